"""Benchmarks: `python -m bench list` shows them, `python -m bench NAME [options]` runs one."""
