"""Torch on one thread for these tests."""

from tests.models import one_thread

__all__ = ["one_thread"]
