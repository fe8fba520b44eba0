"""The router's counters exist from its start: `increase()` does not see the first event of a counter that appears with it."""

from tests.router.harness import Fleet
from tests.servers.redis_server import RedisServer


async def test_counters_by_reason_begin_at_zero(fleet: Fleet) -> None:
    with RedisServer() as redis:
        router = await fleet.router(await fleet.worker(), redis_url=redis.url)
        text = (await router.client.get("/metrics")).text
    for reason in ("key", "quota", "queue", "queue_timeout", "slo", "cached_first", "hold"):
        assert f'fairlead_router_refused_total{{reason="{reason}"}} 0.0' in text
    for reason in ("connect", "lost", "refused", "busy", "canary"):
        assert f'fairlead_router_retries_total{{reason="{reason}"}} 0.0' in text
    assert 'fairlead_router_task_failures_total{task="index watch"} 0.0' in text
