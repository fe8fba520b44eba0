"""The engine in one process: the scheduler's own cost, and the forward pass on a CPU."""
