"""How checkpoints store weights of few bits: one class for each format, and the module that each becomes."""
