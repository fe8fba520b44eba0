"""`make gpu-check`: is the GPU path right on this machine, and how fast. With `--device cpu` the same stages run without a GPU."""
