"""`fairlead schedule`: what a worker computed, step by step, as a picture. Reads a file of `--trace-schedule`; imports no other room."""
