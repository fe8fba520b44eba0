"""One worker and one router for the module's tests."""

from collections.abc import Iterator

import pytest
from tests.api.fleet import Pair
from tests.api.fuzz import ROUTER_FLAGS, WORKER_FLAGS


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("api"), *WORKER_FLAGS, router_flags=ROUTER_FLAGS) as pair:
        yield pair
        assert pair.alive, "no request has ended a process"
