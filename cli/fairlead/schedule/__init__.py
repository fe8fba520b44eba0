"""`fairlead schedule`: draws the steps of a worker from a file of `--trace-schedule`. Imports no other package of Fairlead."""
