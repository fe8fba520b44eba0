"""Compiled kernels for CPUs: a small C library, built once at install, called through ctypes. Without it the engine runs on torch alone."""
