"""`fairlead schedule`: draws the steps of a worker from a file of `--trace-schedule`."""
