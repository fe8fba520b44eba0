"""Tensor parallel: one model over the devices of one pod or of several (nodes), a process (rank) for each. Rank 0 is the engine.

May import `model`, `execution`, `kernels` and the messages; its users are the engine process and, on other nodes, `node`.
"""
