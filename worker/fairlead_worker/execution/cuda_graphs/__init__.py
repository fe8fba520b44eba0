"""Recorded CUDA graphs: of decode steps, of steps with prompts in pieces, and their recorder."""
