"""Attention over paged KV. `reference` is the oracle of every test."""
