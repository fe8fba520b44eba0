"""Tensor parallel: one model over the devices of one pod, a process (rank) for each. Rank 0 is the engine; the others follow it.

May import `model`, `execution`, `kernels` and the messages; the engine process is its only user.
"""
