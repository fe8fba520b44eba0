"""Layers of our own models, over packed rows: [tokens, width], without padding."""
