"""A reflector never repeats a request in a busy loop."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.client import Cluster
from fairlead_operator.kube.kinds import PODS, Kind
from fairlead_operator.kube.reflector import Reflector


class EndingWatches:
    """An API server that ends every watch immediately and without an error, as a proxy in front of it may do."""

    def __init__(self) -> None:
        self.watches = 0

    async def pages(self, kind: Kind, namespace: str, *, labelled: bool) -> AsyncIterator[tuple[list[dict[str, Any]], int]]:
        yield [], 1

    async def watch(self, kind: Kind, namespace: str, version: int) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        self.watches += 1
        for event in ():
            yield event


async def test_a_watch_that_ends_at_once_is_repeated_after_a_pause() -> None:
    server = EndingWatches()
    reflector = Reflector(cast(Cluster, server), Cache(lambda owner: None), PODS, "", asyncio.Lock())
    task = asyncio.create_task(reflector.run())
    await asyncio.wait_for(reflector.synced.wait(), 10)
    for _ in range(100):
        await asyncio.sleep(0)
    task.cancel()
    assert server.watches == 1
