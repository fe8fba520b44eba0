"""Fixtures of the router's tests."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvloop
from tests.router.harness import Fleet


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Use uvloop as production does: its transports differ in places from asyncio's."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def short_reloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_router.file_follower.RELOAD_SECONDS", 0.05)


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """Hide the objects of other tests from the garbage collector, which lists hundreds of thousands otherwise."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(stack, tmp_path)
