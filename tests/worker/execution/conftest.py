"""Torch on one thread for these tests."""

from tests.models import one_thread, quick_collections

__all__ = ["one_thread", "quick_collections"]
