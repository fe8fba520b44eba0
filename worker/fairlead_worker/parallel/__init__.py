"""Tensor parallelism: one model over the devices of one pod or of several (nodes), one process (rank) per device. Rank 0 is the engine.

It may import `model`, `execution`, `kernels` and the messages. The engine process uses it; `node` is the main module of the other nodes.
"""
