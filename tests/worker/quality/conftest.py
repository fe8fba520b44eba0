"""Torch on one thread for these tests: threads that wait for each other on a busy machine take many times as long."""

from tests.models import one_thread

__all__ = ["one_thread"]
