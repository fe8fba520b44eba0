"""The GPU path: is it correct on this machine, and how fast. `--device cpu` runs the same stages without a GPU."""
