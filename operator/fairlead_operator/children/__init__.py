"""The objects of one service, as dicts for server-side apply. Pure: no I/O, no clock, no randomness."""
