"""How the ranks of a model share it: which part of each tensor is whose, and the collectives between them."""
