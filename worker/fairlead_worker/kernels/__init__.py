"""Attention over paged KV: what a backend is, and the backends. `reference` is the oracle of every test.

Imports torch and no other part of the worker.
"""
