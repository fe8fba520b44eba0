"""Torch on one thread for these tests, and a fake GPU for each."""

from collections.abc import Iterator

import pytest
from tests.models import one_thread, quick_collections
from tests.worker.fake_gpu.device.gpu import FakeGpu
from tests.worker.fake_gpu.device.worker import fake_worker

__all__ = ["one_thread", "quick_collections"]


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_worker() as made:
        yield made
