"""Balance of a burst: 256 simultaneous requests with one cold prefix through 4 routers on 8 workers.

The routers are separate processes. The workers are the tests' mock workers: they answer when all requests have arrived, and they report
their waiting requests as engines do, to the index twice a second and in health checks. The figure is the number of requests of the
busiest worker divided by the mean, for each way of reading the index, with Redis and while Redis is down.
"""

import asyncio
import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
from tests.router.harness import eventually
from tests.router.stand_in_worker import Exchange, StandIn, answers
from tests.servers.redis_server import RedisServer, free_port

from bench.common.report import make_parser, write_report

ROUTERS, WORKERS, REQUESTS = 4, 8, 256
TARGET = 1.3
PREFIX = "a system prompt that is in no cache, " * 40


class Burst:
    """Hold all answers until every request has arrived."""

    def __init__(self) -> None:
        self._all = asyncio.Event()
        self._times: list[float] = []

    async def behaviour(self, exchange: Exchange) -> None:
        self._times.append(time.monotonic())
        if len(self._times) == REQUESTS:
            self._all.set()
        await self._all.wait()
        await answers(exchange)

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last."""
        return self._times[-1] - self._times[0]


@asynccontextmanager
async def router(redis: RedisServer, workers: list[StandIn], mode: str) -> AsyncIterator[str]:
    """Yield the URL of a router that is ready and reads the index in this mode."""
    url = f"http://127.0.0.1:{free_port()}"
    flags = {
        "host": "127.0.0.1",
        "port": url.rpartition(":")[2],
        "workers": "static://" + ",".join(worker.address for worker in workers),
        "redis-url": redis.url,
        "index-namespace": "bench/herd",
        "index-mode": mode,
        "drain-grace": "0",
        "router-replicas": str(ROUTERS),
    }
    command = [sys.executable, "-m", "fairlead_router.main", *(f"--{flag}={value}" for flag, value in flags.items())]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/ready") as ready, session.get(f"{url}/fairlead/workers") as shown:
                        picture = await shown.json()
                        usable = sum(worker["usable"] for worker in picture["workers"])
                        if ready.status == 200 and picture["index_read"] == mode and usable == WORKERS:
                            break
                await asyncio.sleep(0.05)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def measure(mode: str, away: bool) -> tuple[float, float]:
    """Return the load of the busiest worker divided by the mean, and the seconds in which the burst arrived."""
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        burst = Burst()
        workers = []
        for number in range(WORKERS):
            worker = StandIn(f"pod-{number}", behaviour=burst.behaviour, redis=(redis.url, "bench/herd"))
            workers.append(await worker.start())
            stack.push_async_callback(worker.kill)
        await eventually(lambda: all(worker.joined for worker in workers), "the workers joined the index")
        urls = [await stack.enter_async_context(router(redis, workers, mode)) for _ in range(ROUTERS)]
        if away:
            redis.kill()
            await asyncio.sleep(2.0)  # noticed by everybody
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        pods: Counter[str] = Counter()

        async def one(number: int) -> None:
            body = {"model": "stand-in", "prompt": f"{PREFIX} {number}"}
            async with session.post(f"{urls[number % ROUTERS]}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                pods[answer.headers["x-fairlead-pod"]] += 1

        await asyncio.gather(*(one(number) for number in range(REQUESTS)))
        return max(pods.values()) * WORKERS / REQUESTS, burst.seconds


async def run(repeats: int) -> dict[str, list[tuple[float, float]]]:
    kinds = [(mode, away) for away in (False, True) for mode in ("remote", "mirror")]
    found: dict[str, list[tuple[float, float]]] = {}
    for repeat in range(repeats):
        for mode, away in kinds:
            name = f"{mode}, {'redis away' if away else 'redis up'}"
            found.setdefault(name, []).append(await measure(mode, away))
            print(f"{repeat + 1} of {repeats}: {name}: {found[name][-1][0]:.2f}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # workers that cannot take leave of a Redis that was killed
    found = asyncio.run(run(arguments.repeats))
    print(f"{'busiest worker over the mean':<34} {'each repeat':<24} target  arrival s")
    for name, figures in found.items():
        shares = " ".join(f"{share:.2f}" for share, _ in figures)
        verdict = "ok" if max(share for share, _ in figures) <= TARGET else "missed"
        print(f"herding_{name:<26} {shares:<24} {TARGET}  {max(seconds for _, seconds in figures):.2f}  {verdict}")
    write_report(__name__, arguments, found)
