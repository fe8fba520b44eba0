"""A stand-in worker as its own process, to be killed, stopped and cut off: `python -m tests.system.worker_process --port P ...`.

A request says how it is answered: `prefill_seconds` before the first token, `max_tokens` tokens, `token_seconds` between them. On SIGTERM
the worker drains as a real one: it leaves the index, refuses new requests, finishes running ones, and exits with 0.
"""

import argparse
import asyncio
import signal

import uvloop
from tests.router.stand_in_worker import Exchange, StandIn, drains


class Generating:
    """The behaviour for requests, which counts the running ones for a drain."""

    def __init__(self) -> None:
        self.running = 0
        self.idle = asyncio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        self.running += 1
        self.idle.clear()
        try:
            await self._answer(exchange)
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def _answer(self, exchange: Exchange) -> None:
        wanted = exchange.request.json
        await asyncio.sleep(wanted.get("prefill_seconds", 0.05))
        count, pause = wanted.get("max_tokens", 5), wanted.get("token_seconds", 0.02)
        if not wanted.get("stream"):
            await asyncio.sleep(count * pause)
            await exchange.whole(200, {"object": "text_completion", "choices": [{"index": 0, "text": " word" * count}]})
            return
        await exchange.head()
        for number in range(count):
            await exchange.event(f" {number}")
            await asyncio.sleep(pause)
        await exchange.end()


async def serve(arguments: argparse.Namespace) -> None:
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    generating = Generating()
    redis = (arguments.redis_url, arguments.index_namespace) if arguments.redis_url else None
    worker = StandIn(pod=arguments.pod_name, behaviour=generating, redis=redis, host=arguments.host)
    await worker.start(arguments.port)
    await asked.wait()
    worker.ready, worker.behaviour = False, drains
    await worker.leave_index()
    if generating.running:
        await generating.idle.wait()
    await worker.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pod-name", required=True)
    parser.add_argument("--redis-url", default="")
    parser.add_argument("--index-namespace", default="default/faults")
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
