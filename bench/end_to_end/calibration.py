"""TTFT of real workers beside the simulator's, for the same requests: how far the simulator can be trusted.

Four workers run with CPU limits like those of pods, behind the real router. Before and after each workload, the terms of the simulator are
measured with requests that are alone at their worker (`bench/common/step_terms.py`), because a shared machine changes its speed within
minutes. All workers are measured at the same time and as busy as in the workloads, because they share cores and memory. Each workload
arrives open-loop, and the simulator replays the same arrivals, block structures, pages and policy with these terms: by the pods that run
the engine's scheduler, and by the flow pods of `fairlead simulate`. It draws ties and the phases of reports with several seeds, because
the real ones are not known.

Each workload runs twice, with empty caches. The ratio of the two is the noise that no simulator can be below.
"""

import asyncio
import os
import random
import re
import statistics
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common.cpu_limit import favor_cpu, limit_cpu
from bench.common.report import make_parser, write_report
from bench.common.step_terms import REPLY_TOKENS, Samples, Terms, draw_tokens, find_terms, measure, measure_api_cpu, measure_router, send
from fairlead.bench.datasets import Prompt
from fairlead.demo.command import default_root, make_demo_model
from fairlead.demo.play import wait_usable
from fairlead.local.cluster import LocalCluster
from fairlead.local.kubelet import free_port
from fairlead.local.manifest import read_manifest
from fairlead.simulate.engine_pod import EngineModel
from fairlead.simulate.pods import PodModel
from fairlead.simulate.replay import Scenario, replay
from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request
from fairlead_index.hashing import extend
from fairlead_worker.scheduler.chunk_sizer import Work, prefill_work
from fairlead_worker.scheduler.config import SchedulerConfig

WORKERS, PAGE, PAGES, CHUNK, CPU_STEP_MS = 4, 16, 1024, 512, 500.0
READY_SECONDS = 300.0
SIMULATIONS = 10
"""Seeds."""
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
    """`router`: seconds that a request takes longer through the router. `arrival`: what a request takes from a step in flight."""

    terms: Terms
    router: float
    arrival: float


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


async def count_withdrawn(url: str) -> float:
    """Return how many requests the router withdrew from their workers."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        found = re.findall(r'fairlead_router_retries_total\{[^}]*reason="withdrawn"[^}]*\} (\S+)', await answer.text())
    return sum(map(float, found))


async def empty_caches(workers: Sequence[str]) -> None:
    """Drop what the workers cache. Raises aiohttp.ClientResponseError."""
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        for worker in workers:
            async with session.post(f"{worker}/reset_prefix_cache"):
                pass


@dataclass(frozen=True)
class Replayed:
    """`ttfts` in seconds; `cached`: share of the prompt tokens."""

    ttfts: list[float]
    cached: float


@dataclass
class Run:
    """`sides`: the attempts of the real workers, and of each simulator one for each seed."""

    workload: str
    repeat: int
    requests: list[Request]
    sides: dict[str, list[Replayed]]
    measured: list[Measured]
    """At each attempt."""

    def simulate(self) -> None:
        """Replay the requests with the terms of each attempt."""
        for name, replay_requests in (("engine pods", simulate_engine), ("flow pods", simulate_flow)):
            self.sides[name] = [replay_requests(self.requests, each, seed) for each in self.measured for seed in range(SIMULATIONS)]

    def to_json(self) -> dict[str, Any]:
        sides = {name: [asdict(each) for each in found] for name, found in self.sides.items()}
        measured = [asdict(each) for each in self.measured]
        return {"workload": self.workload, "repeat": self.repeat, "sides": sides, "measured": measured}


def figures(found: Sequence[Replayed]) -> dict[str, float]:
    """Return the figures of all runs together: a p99 of one run is the time of one or two requests."""
    times = sorted(ttft for each in found for ttft in each.ttfts)
    return {
        "mean": statistics.fmean(times),
        "p50": statistics.median(times),
        "p99": times[min(len(times) - 1, int(0.99 * len(times)))],
        "cached": statistics.fmean(each.cached for each in found),
    }


def simulate_engine(requests: list[Request], measured: Measured, seed: int) -> Replayed:
    """Replay the requests with pods that run the engine's scheduler."""
    terms = measured.terms
    config = SchedulerConfig(max_model_len=4096, idle_prefill_chunks=5, itl_target_ms=CPU_STEP_MS, chunks_grow=False)
    model = EngineModel(
        config, PAGES, PAGE, terms.costs, between_seconds=terms.between, arrival_seconds=measured.arrival, idle_credit=terms.idle_credit
    )
    return _replay(requests, model, measured, seed)


def simulate_flow(requests: list[Request], measured: Measured, seed: int) -> Replayed:
    """Replay the requests with the pods of `fairlead simulate`. Their block has 512 tokens, so a token counts as many times."""
    scale = BLOCK_TOKENS // PAGE
    attention, token, context, decode, fixed = measured.terms.costs
    fixed += measured.terms.between
    chunk = attention * prefill_work(0, CHUNK) + token * CHUNK + fixed
    model = PodModel(scale * CHUNK / chunk, PAGES, fixed + decode, context / scale, scale * CHUNK)
    scaled = [replace(each, prompt_tokens=scale * each.prompt_tokens) for each in requests]
    return _replay(scaled, model, measured, seed)


def _replay(requests: list[Request], model: EngineModel | PodModel, measured: Measured, seed: int) -> Replayed:
    outcome = replay("fairlead", requests, Scenario(WORKERS, model), seed)
    return Replayed([ttft + measured.terms.outside + measured.router for ttft in outcome.served], outcome.hit_rate)


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
        pods = {f"http://{pod.address}": pod.pid for pod in cluster.kubelet.pods("worker") if pod.pid is not None}
        with favor_cpu(os.getpid()), limit_cpu(list(pods.values()), options.cores):
            fleet = RealFleet(url, model, pods, options)
            await fleet.measure_steps()  # cold workers: not used
            router, arrival = await fleet.measure_once()
            samples, runs = await fleet.measure_steps(), []
            for repeat in range(options.repeats):
                for workload in WORKLOADS:
                    prompts, gaps = make_prompts(workload, options.requests, random.Random(f"{workload} {repeat}"))
                    times = arrival_times(prompts, gaps, options.load, find_terms(samples).costs)
                    each = Run(workload, repeat, to_requests(prompts, times), {"real": []}, [])
                    for attempt in range(options.attempts):
                        real = await fleet.send(prompts, times)
                        before, samples = samples, await fleet.measure_steps()
                        each.measured.append(Measured(find_terms(before + samples), router, arrival))
                        each.sides["real"].append(real)
                        console.print(workload, repeat, attempt, f"{times[-1]:.0f} s", figures([real]))
                    runs.append(each)
            withdrawn = await count_withdrawn(url)
    for each in runs:
        each.simulate()
    return {"withdrawn": withdrawn, "runs": [each.to_json() for each in runs]}


@dataclass
class RealFleet:
    """The workers and their router. `pods`: the process of each worker, by address."""

    url: str
    model: str
    pods: Mapping[str, int]
    options: Any

    async def measure_steps(self) -> Samples:
        """Measure all workers at the same time."""
        found = await asyncio.gather(
            *(
                measure(worker, self.model, random.Random(os.urandom(8)), self.options.measurements, self.options.load)
                for worker in self.pods
            )
        )
        return sum(found, Samples())

    async def measure_once(self) -> tuple[float, float]:
        """Return the seconds of the router, and those that a request takes from a step in flight."""
        draw = random.Random(os.urandom(8))
        router = await measure_router(self.url, next(iter(self.pods)), self.model, draw, 40)
        api = statistics.fmean([await measure_api_cpu(worker, pid, self.model, draw, 5) for worker, pid in self.pods.items()])
        return router, api / self.options.cores

    async def send(self, prompts: Sequence[Prompt], times: Sequence[float]) -> Replayed:
        """Send a workload to workers with empty caches."""
        await empty_caches(list(self.pods))
        await asyncio.sleep(2.0)  # the load reports of the measurement are over
        outcomes = await send(self.url, self.model, prompts, times)
        cached = sum(each.cached_tokens for each in outcomes) / sum(len(prompt.tokens) for prompt in prompts)
        return Replayed([each.ttft for each in outcomes], cached)


def report(results: dict[str, Any], console: Console) -> None:
    """Print the figures of all repeats together, their ratio to the real ones, and that of the last attempts to the first ones."""
    header = ("workload", "figure", "real", "engine pods", "/ real", "flow pods", "/ real", "last attempt / first")
    table = Table(*header, box=None, header_style="dim")
    for workload in WORKLOADS:
        runs = [each["sides"] for each in results["runs"] if each["workload"] == workload]
        found = {side: figures([Replayed(**one) for run in runs for one in run[side]]) for side in runs[0]}
        first, last = (figures([Replayed(**run["real"][at]) for run in runs]) for at in (0, -1))
        for name, real in found["real"].items():
            engine, flow = found["engine pods"][name], found["flow pods"][name]
            cells = (real, engine, engine / real, flow, flow / real, last[name] / first[name])
            table.add_row(workload, name, *(f"{cell:.{2 if at in (2, 4, 5) else 3}f}" for at, cell in enumerate(cells)))
    console.print(table)
    console.print(f"{results['withdrawn']:.0f} requests were withdrawn from their worker")
    measured = [one for run in results["runs"] for one in run["measured"]]
    for name in ("costs", "between", "idle_credit", "outside"):
        console.print(f"{name}:", np.median([one["terms"][name] for one in measured], axis=0))
    console.print(f"router: {measured[0]['router']}, arrival: {measured[0]['arrival']}")


def main() -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--repeats", type=int, default=3, help="prompts and arrivals of each workload")
    parser.add_argument("--attempts", type=int, default=2, help="times that the real workers get the same requests")
    parser.add_argument("--measurements", type=int, default=1, help="repeats of each measurement of the terms")
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
