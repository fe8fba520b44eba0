"""TTFT of real workers beside the simulator's, for the same requests: how far the simulator can be trusted.

Four workers run with CPU limits like those of pods, behind the real router. A short measurement gives the terms of the step model and the
overhead of a request. It is made on all workers at the same time, because they share cores and memory. Then each workload arrives
open-loop, and the simulator replays the same arrivals, block structures, pages and policy with these terms. It draws ties and the phases
of reports with several seeds, because the real ones are not known.

A busy machine slows the real side alone: read the spread of the real repeats first.
"""

import asyncio
import os
import random
import statistics
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common.cpu_limit import limit_cpu
from bench.common.report import make_parser, write_report
from fairlead.bench.client import Outcome, build_request_body, complete
from fairlead.bench.datasets import Prompt
from fairlead.demo.command import default_root, make_demo_model
from fairlead.demo.play import wait_usable
from fairlead.local.cluster import LocalCluster
from fairlead.local.kubelet import free_port
from fairlead.local.manifest import read_manifest
from fairlead.simulate.engine_pod import EngineModel
from fairlead.simulate.replay import Scenario, replay
from fairlead.simulate.workloads.request import Request
from fairlead_index.hashing import extend
from fairlead_worker.scheduler.chunk_sizer import Work, prefill_work
from fairlead_worker.scheduler.config import SchedulerConfig

WORKERS, PAGE, PAGES, CPU_STEP_MS = 4, 16, 1024, 500.0
READY_SECONDS = 300.0
REPLY_TOKENS = 8
SIMULATIONS = 5
PREFILLS = (64, 256, 512, 900, 1400)
DECODES = ((1, 64), (4, 64), (8, 64), (4, 900))
"""Batch size and context of the measured decodes."""
WORKLOADS = ("conversations", "zipf", "bursts")
MANIFEST = f"""
apiVersion: fairlead.dev/v1alpha1
kind: InferenceService
metadata: {{name: calibration}}
spec:
  model: {{uri: "file:///models/demo"}}
  replicas: {WORKERS}
  resources: {{gpus: 0}}
  engine:
    kvCache: {{pageTokens: {PAGE}, blockTokens: {PAGE}, pages: {PAGES}}}
    args: ["--threads", "1"]
  routing: {{policy: PrefixAware, replicas: 1}}
"""


@dataclass(frozen=True)
class Measured:
    """`costs`: seconds of the terms of a step. `overhead`: seconds of a request outside of steps."""

    costs: Work
    overhead: float


def draw_tokens(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(100, 1000), k=count)


def make_prompts(workload: str, count: int, draw: random.Random) -> tuple[list[Prompt], list[float]]:
    """Return prompts and the gaps between them, of mean 1: growing conversations, documents by Zipf's law, or bursts of mixed lengths."""
    tokens: list[list[int]] = []
    gaps = [draw.expovariate(1) for _ in range(count)]
    if workload == "conversations":
        talks: list[list[int]] = []
        for _ in range(count):
            if len(talks) < 12:
                talks.append(draw_tokens(draw, 400))
            place = draw.randrange(len(talks))
            talks[place] = talks[place] + draw_tokens(draw, draw.randint(40, 120))
            tokens.append(talks[place])
            if len(talks[place]) > 1100:
                del talks[place]
    elif workload == "zipf":
        documents = [draw_tokens(draw, draw.randint(400, 900)) for _ in range(36)]
        chosen = draw.choices(documents, weights=[1 / (rank + 1) for rank in range(36)], k=count)
        tokens = [document + draw_tokens(draw, 30) for document in chosen]
    else:
        systems = [draw_tokens(draw, 128) for _ in range(8)]
        lengths = draw.choices(range(1, 21), weights=[rank**-1.1 for rank in range(1, 21)], k=count)
        tokens = [draw.choice(systems) + draw_tokens(draw, 48 * length) for length in lengths]
        gaps = [draw.gammavariate(0.5, 2.0) for _ in range(count)]
    return [Prompt(tuple(each), REPLY_TOKENS) for each in tokens], gaps


def to_requests(prompts: Sequence[Prompt], times: Sequence[float]) -> list[Request]:
    """Return the prompts as the simulator's requests, with chained hashes of their blocks. The last block may be a part of one."""
    requests = []
    for prompt, at in zip(prompts, times, strict=True):
        blocks, parent = array("Q"), 1
        for start in range(0, len(prompt.tokens), PAGE):
            parent = extend(parent, array("I", prompt.tokens[start : start + PAGE]))
            blocks.append(parent)
        requests.append(Request(at, len(prompt.tokens), prompt.output_len, blocks))
    return requests


def necessary_seconds(requests: Sequence[Request], costs: Work) -> float:
    """Return the seconds of all requests, each alone in its steps, with one unlimited cache."""
    seen: set[int] = set()
    seconds = 0.0
    for request in requests:
        cached = min(PAGE * sum(block in seen for block in request.blocks), request.prompt_tokens - 1)
        count = request.prompt_tokens - cached
        seconds += costs[0] * prefill_work(cached, count) + costs[1] * count + costs[4]
        seconds += (request.output_tokens - 1) * (costs[2] * request.prompt_tokens + costs[3] + costs[4])
        seen.update(request.blocks)
    return seconds


def arrival_times(prompts: Sequence[Prompt], gaps: Sequence[float], load: float, costs: Work) -> list[float]:
    """Return times so that the requests need the share `load` of all workers."""
    work = necessary_seconds(to_requests(prompts, [0.0] * len(prompts)), costs)
    scale = work / (load * WORKERS) / sum(gaps)
    return [at * scale for at in accumulate(gaps)]


def fit_costs(ttfts: Sequence[tuple[int, float]], steps: Sequence[tuple[int, int, float]]) -> tuple[Work, float]:
    """Return the step's terms and the seconds of a request outside of steps.

    `ttfts`: uncached tokens and TTFT. `steps`: decodes, their context, and the seconds between two tokens.
    """
    context, decode, fixed = _fit([(batch * context, batch, 1.0) for batch, context, _ in steps], [seconds for *_, seconds in steps])
    attention, token, first = _fit([(prefill_work(0, count), count, 1.0) for count, _ in ttfts], [seconds for _, seconds in ttfts])
    return (attention, token, context, decode, fixed), max(0.0, first - fixed)


def _fit(rows: Sequence[tuple[float, float, float]], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return the terms, none negative, with the least squared relative error."""
    weighted, ones = np.array(rows) / np.array(seconds)[:, None], np.ones(len(seconds))
    best, least = (0.0, 0.0, 0.0), float("inf")
    for used in (list(each) for size in (1, 2, 3) for each in combinations(range(3), size)):  # few enough to try all
        terms = np.zeros(3)
        terms[used] = np.linalg.lstsq(weighted[:, used], ones, rcond=None)[0]
        error = float(np.sum((weighted @ terms - ones) ** 2))
        if terms.min() >= 0 and error < least:
            best, least = (float(terms[0]), float(terms[1]), float(terms[2])), error
    return best


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


async def worker_urls(url: str) -> list[str]:
    """Return the addresses of the workers behind a router."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/fairlead/workers") as answer:
        return [f"http://{worker['address']}" for worker in (await answer.json())["workers"]]


async def measure(url: str, model: str, draw: random.Random, repeats: int) -> tuple[list[tuple[int, float]], list[tuple[int, int, float]]]:
    """Measure one idle worker: TTFT by prompt length, and the time between tokens by batch and context."""
    ttfts, steps = [], []
    for _ in range(repeats):
        for count in PREFILLS:
            (outcome,) = await send(url, model, [Prompt(tuple(draw_tokens(draw, count)), 1)], [0.0])
            ttfts.append((count, outcome.ttft))
        for batch, context in DECODES:
            outcomes = await send(url, model, [Prompt(tuple(draw_tokens(draw, context)), 24) for _ in range(batch)], [0.0] * batch)
            last = [gap for outcome in outcomes for gap in outcome.itl[-12:]]
            steps.append((batch, context + 16, statistics.mean(last)))
    return ttfts, steps


def figures(ttfts: Sequence[float], cached: float) -> dict[str, float]:
    times = sorted(ttfts)
    return {
        "mean": statistics.fmean(times),
        "p50": statistics.median(times),
        "p99": times[min(len(times) - 1, int(0.99 * len(times)))],
        "cached": cached,
    }


def simulate(requests: list[Request], measured: Measured, seed: int) -> dict[str, float]:
    """Replay the requests with the measured step model."""
    config = SchedulerConfig(max_model_len=4096, idle_prefill_chunks=5, itl_target_ms=CPU_STEP_MS, chunks_grow=False)
    model = EngineModel(config, PAGES, PAGE, measured.costs)
    outcome = replay("fairlead", requests, Scenario(WORKERS, model), seed)
    return figures([ttft + measured.overhead for ttft in outcome.served], outcome.hit_rate)


async def run(options: Any, console: Console) -> dict[str, Any]:
    root = make_demo_model(default_root(), console)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibration.yaml"
        path.write_text(MANIFEST)
        manifest = read_manifest(path)
    cluster = LocalCluster("calibration", port=free_port(set()), host_env=dict(os.environ), cpus=os.cpu_count() or 1, model_root=root)
    async with cluster:
        cluster.apply(manifest)
        await cluster.wait_ready(READY_SECONDS)
        url, model = cluster.urls[manifest.services[0].name], manifest.services[0].served_model_name
        await wait_usable(url, WORKERS, READY_SECONDS)
        with limit_cpu([pod.pid for pod in cluster.kubelet.pods("worker") if pod.pid is not None], options.cores):
            workers = await worker_urls(url)
            await asyncio.gather(*(measure(each, model, random.Random(f"warm-up {each} {os.getpid()}"), 1) for each in workers))
            found = await asyncio.gather(*(measure(each, model, random.Random(f"{each} {os.getpid()}"), 2) for each in workers))
            ttfts, steps = [one for each, _ in found for one in each], [one for _, each in found for one in each]
            measured = Measured(*fit_costs(ttfts, steps))
            console.print(measured)
            for count in PREFILLS:
                console.print(f"TTFT of {count} tokens:", *(f"{seconds:.3f}" for each, seconds in ttfts if each == count))
            runs = []
            for repeat in range(options.repeats):
                for workload in WORKLOADS:
                    prompts, gaps = make_prompts(workload, options.requests, random.Random(f"{workload} {repeat} {os.getpid()}"))
                    times = arrival_times(prompts, gaps, options.load, measured.costs)
                    outcomes = await send(url, model, prompts, times)
                    share = sum(each.cached_tokens for each in outcomes) / sum(len(prompt.tokens) for prompt in prompts)
                    requests = to_requests(prompts, times)
                    real = figures([each.ttft for each in outcomes], share)
                    simulated = [simulate(requests, measured, seed) for seed in range(SIMULATIONS)]
                    runs.append({"workload": workload, "repeat": repeat, "real": real, "simulated": simulated})
                    console.print(workload, repeat, f"{times[-1]:.0f} s", real, simulated[0])
                    await asyncio.sleep(2.0)  # the load reports of this run are over
    return {"costs": measured.costs, "overhead": measured.overhead, "runs": runs}


def report(results: dict[str, Any], console: Console) -> None:
    """Print the means over repeats and seeds, their ratio, and the spread of the real repeats."""
    table = Table("workload", "figure", "real", "simulated", "simulated / real", "real repeats", box=None, header_style="dim")
    for workload in WORKLOADS:
        runs = [each for each in results["runs"] if each["workload"] == workload]
        for name in ("mean", "p50", "p99", "cached"):
            each = [one["real"][name] for one in runs]
            real = statistics.fmean(each)
            simulated = statistics.fmean(statistics.fmean(outcome[name] for outcome in one["simulated"]) for one in runs)
            spread = f"{min(each):.3f} to {max(each):.3f}"
            table.add_row(workload, name, f"{real:.3f}", f"{simulated:.3f}", f"{simulated / real:.2f}", spread)
    console.print(table)


def main() -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200, help="requests of each run")
    parser.add_argument("--load", type=float, default=0.6, help="share of the workers' time that the requests need")
    parser.add_argument("--cores", type=float, default=0.4, help="CPU limit of each worker; the router and the client need the rest")
    parser.add_argument("--quick", action="store_true", help="one short repeat: does it run")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.requests = 1, 30
    console = Console(width=150)
    results = asyncio.run(run(options, console))
    report(results, console)
    write_report(__name__, options, results)
    return 0
