"""CPU kernels, and the limits of the machine."""
