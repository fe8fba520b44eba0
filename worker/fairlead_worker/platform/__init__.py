"""The machine and its processes: CPU level, cores, release, garbage collection during imports, work and exit of processes."""
