"""A GPU without memory: the worker's GPU path runs on fake tensors of a CUDA device, and every operation is recorded with its cost."""
