"""`fairlead keys`: API keys of tenants and the file that a router reads."""
