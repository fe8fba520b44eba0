"""Fixtures of the router's tests."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvloop
from tests.router.harness import Fleet


@pytest.fixture
def event_loop_policy() -> uvloop.EventLoopPolicy:
    """The loop of production: its transports differ in places from asyncio's."""
    return uvloop.EventLoopPolicy()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(stack, tmp_path)
