"""The index in the memory of a router: prefixes, worker loads and reservations, kept current from the change log in Redis."""
