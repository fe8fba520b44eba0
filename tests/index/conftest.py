"""An index test that takes `server` runs against every available server: Redis 6.2, 7 and 8, and Valkey 8.

`either` limits it to one of each kind, for long tests that do not depend on the version.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator

import pytest
from tests.servers.redis_server import VERSIONS, RedisServer, binary

EITHER = ("6.2", next((version for version in reversed(VERSIONS) if binary(version)), VERSIONS[-1]))
either = pytest.mark.parametrize("server", EITHER, indirect=True)
either_own = pytest.mark.parametrize("own_server", EITHER, indirect=True)


@pytest.fixture(scope="session", params=VERSIONS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """One server for the session; tests keep apart by namespace."""
    if binary(request.param) is None:
        pytest.skip(f"no redis-server {request.param} on this machine: make redis-servers")
    with RedisServer(request.param) as running:
        yield running


@pytest.fixture(params=VERSIONS)
def own_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """Yield a server that the test may kill."""
    if binary(request.param) is None:
        pytest.skip(f"no redis-server {request.param} on this machine: make redis-servers")
    with RedisServer(request.param) as running:
        yield running


@pytest.fixture
def namespace() -> str:
    return f"tests/{uuid.uuid4().hex[:12]}"


async def eventually(check: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    """Poll until `check` holds. Fails after `seconds`."""
    give_up = time.monotonic() + seconds
    while not await check():
        assert time.monotonic() < give_up, f"still not so after {seconds} s"
        await asyncio.sleep(0.01)


async def equals(ask: Callable[[], Awaitable[object]], expected: object) -> bool:
    """Return whether the awaited answer is `expected`, for `eventually`."""
    return await ask() == expected


async def as_coroutine(value: bool) -> bool:
    """Return `value`, for `eventually`."""
    return value
