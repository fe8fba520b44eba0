"""One way to write a test for a client's blocking and asynchronous forms."""

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


async def settled(value: Any) -> Any:
    """Return the result of a call, awaited if necessary."""
    return await value if inspect.isawaitable(value) else value


async def each(stream: Any) -> AsyncIterator[Any]:
    """Iterate over a stream."""
    if hasattr(stream, "__aiter__"):
        async for item in stream:
            yield item
    else:
        for item in stream:
            yield item


async def all_of(stream: Any) -> list[Any]:
    return [item async for item in each(stream)]


@asynccontextmanager
async def opened(manager: Any) -> AsyncIterator[Any]:
    if hasattr(manager, "__aenter__"):
        async with manager as inside:
            yield inside
    else:
        with manager as inside:
            yield inside
