"""How a service's workers are replaced: which revision, how many at once, and what is said about it. Pure: no I/O, no clock, no memory."""
