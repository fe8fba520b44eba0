"""A step plan becomes tensors, one forward pass and sampled tokens."""
