"""Send prompts on schedule: Poisson (or burstier) arrivals at a rate, or a trace's times, with a limit on concurrency."""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from fairlead.bench.client import Outcome
from fairlead.bench.datasets import Prompt


def schedule_arrivals(prompts: Sequence[Prompt], *, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the send time of each prompt in seconds after the start.

    A trace keeps its times. Otherwise gaps are gamma-distributed and add up to count / rate.
    `burstiness` 1 is a Poisson process, below 1 burstier, above 1 more even; an infinite `rate` sends everything immediately.
    """
    if prompts and all(prompt.at is not None for prompt in prompts):
        return [prompt.at or 0.0 for prompt in prompts]
    if math.isinf(rate):
        return [0.0] * len(prompts)
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in prompts:
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(now)
    stretch = len(prompts) / rate / now if now else 1.0  # as vllm bench serve does: the sum of random gaps is off by a few percent
    return [at * stretch for at in times]


async def send_all(
    prompts: Sequence[Prompt],
    times: Sequence[float],
    send: Callable[[int, Prompt], Awaitable[Outcome]],
    *,
    max_concurrency: int | None,
    progress: Callable[[], None],
) -> tuple[list[Outcome], float]:
    """Send all prompts. Return the outcomes in the order of `prompts`, and the duration in seconds."""
    slot: contextlib.AbstractAsyncContextManager[object] = (
        asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    )

    async def send_one(number: int, prompt: Prompt) -> Outcome:
        async with slot:
            outcome = await send(number, prompt)
        progress()
        return outcome

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number, (prompt, at) in enumerate(zip(prompts, times, strict=True)):
            wait = began + at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(send_one(number, prompt)))
    return [task.result() for task in tasks], time.perf_counter() - began
