"""How a service's workers are replaced: which revision, how many at once, and its reported progress. Pure: no I/O, clock or memory."""
