"""One batch server for the tests that leave it as it was."""

from collections.abc import Iterator

import pytest
from tests.router.batch.deployment import Deployment


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("batch"), keys=True) as running:
        yield running
