"""Fixtures of the router's tests."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.router.harness import Fleet


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(stack, tmp_path)
