"""Torch on one thread for these tests, and two ranks."""

from collections.abc import Iterator

import pytest
from tests.models import one_thread
from tests.worker.parallel.pair import Pair

__all__ = ["one_thread"]


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()
