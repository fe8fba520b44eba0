"""`fairlead models`: the families that are served, and those that are refused."""
