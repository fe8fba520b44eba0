"""Weights of few bits on a GPU: layers that keep them, and kernels that round activations."""
