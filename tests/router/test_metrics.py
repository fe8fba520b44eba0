"""The router's counters exist from its start: `increase()` does not see the first event of a counter that appears with it."""

from typing import get_args

from tests.router.harness import Fleet
from tests.servers.redis_server import RedisServer

from fairlead_router.metrics import RefusalReason, RetryReason


async def test_counters_by_reason_begin_at_zero(fleet: Fleet) -> None:
    with RedisServer() as redis:
        router = await fleet.router(await fleet.worker(), redis_url=redis.url)
        text = (await router.client.get("/metrics")).text
    for reason in get_args(RefusalReason):
        assert f'fairlead_router_refused_total{{reason="{reason}"}} 0.0' in text
    for reason in get_args(RetryReason):
        assert f'fairlead_router_retries_total{{reason="{reason}"}} 0.0' in text
    assert 'fairlead_router_task_failures_total{task="index watch"} 0.0' in text
