"""Checkpoints and adapters that the stages make."""
