"""A client's blocking and asynchronous forms, in one way of writing."""

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


async def settled(value: Any) -> Any:
    """What a call answers."""
    return await value if inspect.isawaitable(value) else value


async def each(stream: Any) -> AsyncIterator[Any]:
    """What a stream yields."""
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
