"""Fixtures of the router's tests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvloop
from tests.router.harness import Fleet


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Use uvloop as production does: its transports differ in places from asyncio's."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(stack, tmp_path)
