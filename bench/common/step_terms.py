"""The terms of one worker's time, measured from outside: steps, the time between and outside of them, and the API process's CPU time.

The worker's own histogram of step times separates the engine from everything around it, so every term is measured, and none is a remainder.
"""

import asyncio
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import aiohttp
import numpy as np

from fairlead.bench.client import Outcome, build_request_body, complete
from fairlead.bench.datasets import Prompt
from fairlead_worker.scheduler.chunk_sizer import Work, prefill_work

PREFILLS = (24, 40, 64, 128, 256, 512, 900, 1400)
"""Prompt lengths, in tokens."""
DECODES = ((1, 64), (4, 64), (8, 64), (4, 900))
"""Batch size and context of the measured decodes."""
REPLY_TOKENS = 8
DECODE_TOKENS = 24
_STEPS = re.compile(r'fairlead_step_seconds_(sum|count)\{[^}]*kind="(\w+)"[^}]*\} (\S+)')


@dataclass(frozen=True)
class Prefill:
    """One prompt on an idle worker, and its answer. `step_seconds`: of its `steps` with prefill. `decode_seconds`: of its decode steps."""

    tokens: int
    ttft: float
    steps: float
    step_seconds: float
    latency: float
    decode_steps: float
    decode_seconds: float


@dataclass(frozen=True)
class Decode:
    """`seconds`: between two tokens of `batch` streams of `context` tokens."""

    batch: int
    context: int
    seconds: float


@dataclass
class Samples:
    prefills: list[Prefill] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)

    def __add__(self, other: "Samples") -> "Samples":
        return Samples(self.prefills + other.prefills, self.decodes + other.decodes)


@dataclass(frozen=True)
class Terms:
    """In seconds. `costs`: of a step. `between`: two steps. `idle_credit`: how much shorter the first step of an idle worker is.

    `outside`: of a request, from the client's call to the first step and from the end of the last prefill step to the first token.
    """

    costs: Work
    between: float
    idle_credit: float
    outside: float


def find_terms(samples: Samples) -> Terms:
    """Return the terms that the samples show. The costs have the least squared relative error, and none is negative.

    Raises ValueError for a sample without steps, or with steps that took no time.
    """
    for one in samples.prefills:
        if min(one.step_seconds, one.decode_steps) <= 0:
            counted = f"{one.step_seconds:g} s of prefill and {one.decode_steps:g} decode steps"
            raise ValueError(f"a prompt of {one.tokens} tokens has {counted}: measure workers whose fairlead_step_seconds counts its steps")
    between = statistics.fmean((one.latency - one.ttft - one.decode_seconds) / one.decode_steps for one in samples.prefills)
    between = max(0.0, between)
    rows: list[tuple[float, ...]] = [(prefill_work(0, one.tokens), one.tokens, 0.0, 0.0, one.steps, -1.0) for one in samples.prefills]
    rows += [(0.0, 0.0, one.batch * one.context, one.batch, 1.0, 0.0) for one in samples.decodes]
    seconds = [one.step_seconds for one in samples.prefills] + [one.seconds - between for one in samples.decodes]
    if min(seconds) <= 0:
        raise ValueError(f"{min(seconds):g} s are left of a decode step after the {between:g} s between two steps: measure longer answers")
    attention, token, context, decode, fixed, credit = fit(rows, seconds)
    outside = statistics.fmean(one.ttft - one.step_seconds - (one.steps - 1) * between for one in samples.prefills)
    return Terms((attention, token, context, decode, fixed), between, credit, max(0.0, outside))


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the factors of the columns, none negative, with the least squared relative error."""
    columns = range(len(rows[0]))
    weighted, ones = np.array(rows) / np.array(seconds)[:, None], np.ones(len(seconds))
    best, least = np.zeros(len(columns)), float("inf")
    for used in (list(each) for size in range(1, len(columns) + 1) for each in combinations(columns, size)):  # few enough to try all
        terms = np.zeros(len(columns))
        terms[used] = np.linalg.lstsq(weighted[:, used], ones, rcond=None)[0]
        error = float(np.sum((weighted @ terms - ones) ** 2))
        if terms.min() >= 0 and error < least:
            best, least = terms, error
    return [float(term) for term in best]


def draw_tokens(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(100, 1000), k=count)


async def send(url: str, model: str, prompts: Sequence[Prompt], times: Sequence[float]) -> list[Outcome]:
    """Send the prompts at their times. Raises RuntimeError if one fails."""
    clock = asyncio.get_running_loop().time
    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as group:
        began, tasks = clock(), []
        for prompt, at in zip(prompts, times, strict=True):
            await asyncio.sleep(max(0.0, began + at - clock()))
            body = build_request_body(model, prompt, ignore_eos=True, temperature=0.0)
            tasks.append(group.create_task(complete(session, f"{url}/v1/completions", body, len(prompt.tokens))))
    outcomes = [task.result() for task in tasks]
    if failed := [outcome.error for outcome in outcomes if outcome.error]:
        raise RuntimeError(f"{len(failed)} of {len(outcomes)} requests failed: {failed[0]}")
    return outcomes


async def measure(url: str, model: str, draw: random.Random, repeats: int, load: float) -> Samples:
    """Measure a worker that does nothing else. It rests after each request, so that it works for `load` of the time."""
    samples, loop = Samples(), asyncio.get_running_loop()

    async def run(prompts: list[Prompt]) -> list[Outcome]:
        began = loop.time()
        outcomes = await send(url, model, prompts, [0.0] * len(prompts))
        await asyncio.sleep((loop.time() - began) * (1 / load - 1))
        return outcomes

    before = await _step_seconds(url)
    for _ in range(repeats):
        for count in draw.sample(PREFILLS, len(PREFILLS)):
            (outcome,) = await run([Prompt(tuple(draw_tokens(draw, count)), REPLY_TOKENS)])
            after = await _step_seconds(url)
            spent = {key: after[key] - before.get(key, 0.0) for key in after}
            before = after
            samples.prefills.append(
                Prefill(
                    count,
                    outcome.ttft,
                    spent["prefill", "count"],
                    spent["prefill", "sum"],
                    outcome.latency,
                    spent["decode", "count"],
                    spent["decode", "sum"],
                )
            )
        for batch, context in DECODES:
            outcomes = await run([Prompt(tuple(draw_tokens(draw, context)), DECODE_TOKENS) for _ in range(batch)])
            last = [gap for outcome in outcomes for gap in outcome.itl[-DECODE_TOKENS // 2 :]]
            samples.decodes.append(Decode(batch, context + 16, statistics.fmean(last)))
        before = await _step_seconds(url)
    return samples


async def measure_router(url: str, worker: str, model: str, draw: random.Random, pairs: int) -> float:
    """Return the median of the seconds that a request takes longer through the router at `url` than without it. All are idle."""
    differences = []
    for pair in range(pairs):
        ttfts = {}
        for each in (url, worker) if pair % 2 else (worker, url):
            (outcome,) = await send(each, model, [Prompt(tuple(draw_tokens(draw, PREFILLS[0])), REPLY_TOKENS)], [0.0])
            ttfts[each] = outcome.ttft
            await asyncio.sleep(0.05)
        differences.append(ttfts[url] - ttfts[worker])
    return max(0.0, statistics.median(differences))


async def measure_api_cpu(url: str, pid: int, model: str, draw: random.Random, requests: int) -> float:
    """Return the CPU seconds of an API process for a request with an answer of one token, less what it uses while idle."""
    began = cpu_seconds(pid)
    await asyncio.sleep(2.0)
    idle = (cpu_seconds(pid) - began) / 2.0
    loop = asyncio.get_running_loop()
    began, at = cpu_seconds(pid), loop.time()
    for _ in range(requests):
        await send(url, model, [Prompt(tuple(draw_tokens(draw, 512)), 1)], [0.0])
    return max(0.0, cpu_seconds(pid) - began - idle * (loop.time() - at)) / requests


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, without its children. `/proc/PID/stat` counts in units of 10 ms."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def _step_seconds(url: str) -> dict[tuple[str, str], float]:
    """Return the sum and the count of the worker's step times, by kind of step."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        return {(kind, part): float(value) for part, kind, value in _STEPS.findall(await answer.text())}
