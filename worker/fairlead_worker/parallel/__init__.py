"""Tensor parallelism: one model over the devices of one pod or of several (nodes), one process (rank) per device. Rank 0 is the engine.

May import `model`, `execution`, `kernels` and the messages. Its users are the engine process and, on other nodes, `node`.
"""
