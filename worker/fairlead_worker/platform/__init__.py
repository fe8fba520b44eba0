"""What the machine and the process are: CPU level, cores, release, import cost, exit status."""
