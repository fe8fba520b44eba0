"""TTFT and goodput of real workers at 0.7, 1.0 and 1.5 times their capacity, behind different routers.

Four workers run throughout, each limited to its part of the CPU, and only the router changes: Fairlead's router with PrefixAware,
RoundRobin and LeastLoad, and sglang-router with its cache-aware policy in front of the same workers. Requests ask about one of several
documents (by Zipf's law), so that all documents together fit into the fleet's KV cache and not into one worker's. Arrivals are an open-loop
Poisson process with the same times for all routers. Each run's prompts begin with its own name, so no run finds cached blocks of another.

The capacity is what RoundRobin completes per second, with warm caches, when all requests come at once. Goodput counts the requests per
second of arrival time that got their first token within `--slo` seconds. On a shared machine only the comparison is meaningful.
"""

import asyncio
import os
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from bench.common.cpu_limit import limit_cpu
from bench.common.report import make_parser, write_report
from bench.other_servers.environments import Environment, NotMade, make
from bench.other_servers.process import Running, free_port
from bench.other_servers.servers import Command
from fairlead.bench.client import Outcome, complete
from fairlead.bench.datasets import Prompt
from fairlead.bench.load import schedule_arrivals
from fairlead.demo.command import default_root, make_demo_model, with_policy
from fairlead.demo.play import wait_usable
from fairlead.local.cluster import LocalCluster
from fairlead.local.kubelet import free_port as free_router_port
from fairlead.local.manifest import Manifest, read_manifest

OURS = ("PrefixAware", "RoundRobin", "LeastLoad")
SGLANG = "sglang-router"
WORKERS = 4
DOCUMENTS, DOCUMENT_CHARACTERS = 36, 2600
REPLY_TOKENS = 8
READY_SECONDS = 300.0
FIGURES = ("ttft_p50", "ttft_p99", "goodput", "refused", "cached", "imbalance")
CAPACITY_RATE = 16
"""Requests that measure the capacity, for each second of a run."""
WARM_UP = 24
"""Requests before each run, unmeasured: the routers learn the workers' rates."""
CACHE = Path.home() / ".cache" / "fairlead" / "peers"
MANIFEST = f"""
apiVersion: fairlead.dev/v1alpha1
kind: InferenceService
metadata: {{name: overload}}
spec:
  model: {{uri: "file:///models/demo"}}
  replicas: {WORKERS}
  resources: {{gpus: 0}}
  engine:
    kvCache: {{pageTokens: 16, blockTokens: 16, pages: 1024}}
    args: ["--threads", "1"]
  routing: {{policy: PrefixAware, replicas: 1}}
"""


@dataclass(frozen=True)
class Target:
    """The endpoint of a router."""

    url: str
    model: str


def questions(run: str, count: int, seed: int) -> list[list[dict[str, str]]]:
    """Return the messages of `count` requests: a document of about 650 tokens chosen by Zipf's law, and a question."""
    texts = [text.strip()[:DOCUMENT_CHARACTERS] for _, text in sorted(topics.items()) if len(text) > DOCUMENT_CHARACTERS][:DOCUMENTS]
    draw = random.Random(seed)
    chosen = draw.choices(range(len(texts)), weights=[1 / (rank + 1) for rank in range(len(texts))], k=count)
    return [
        [
            {"role": "system", "content": f"[{run}] Answer questions about text {document}.\n\n{texts[document]}"},
            {"role": "user", "content": f"Question {number}: what does rule {draw.randrange(100)} say?"},
        ]
        for number, document in enumerate(chosen)
    ]


async def send(target: Target, messages: Sequence[list[dict[str, str]]], rate: float, seed: int) -> tuple[list[Outcome], float]:
    """Send one request for each of `messages` at `rate` per second. Return the outcomes, and the seconds until the last one."""
    times = schedule_arrivals([Prompt((), REPLY_TOKENS)] * len(messages), rate=rate, burstiness=1.0, seed=seed)
    clock = asyncio.get_running_loop().time
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,
    ):
        began, tasks = clock(), []
        for one, at in zip(messages, times, strict=True):
            await asyncio.sleep(max(0.0, began + at - clock()))
            body = {
                "model": target.model,
                "messages": one,
                "max_tokens": REPLY_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            tasks.append(group.create_task(complete(session, f"{target.url}/v1/chat/completions", body, 0)))
    return [task.result() for task in tasks], clock() - began


def figures(outcomes: Sequence[Outcome], seconds: float, slo: float) -> dict[str, Any]:
    """Return the figures of one run. `seconds`: the arrival time of all requests. A refused request has no TTFT and no goodput."""
    served = sorted(outcome.ttft for outcome in outcomes if outcome.success)
    if not served:
        raise RuntimeError(f"no request was served: {outcomes[0].error}")
    return {
        "requests": len(outcomes),
        "refused": len(outcomes) - len(served),
        "ttft_p50": round(statistics.median(served), 3),
        "ttft_p99": round(served[int(0.99 * (len(served) - 1))], 3),
        "goodput": round(sum(ttft <= slo for ttft in served) / seconds, 3),
    }


async def fleet_tokens(url: str) -> list[tuple[int, int]]:
    """Return the prompt tokens and the cached ones of each worker since its start, as the router `url` reports them."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/fairlead/workers") as answer:
        loads = [worker["load"] for worker in (await answer.json())["workers"]]
    return [(load["prompt_tokens"], load["cached_tokens"]) for load in loads]


def computed(before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return the share of cached prompt tokens, and the most computed tokens of a worker by their mean."""
    prompt = [new[0] - old[0] for old, new in zip(before, after, strict=True)]
    work = [new[0] - new[1] - old[0] + old[1] for old, new in zip(before, after, strict=True)]
    return {"cached": round(1 - sum(work) / sum(prompt), 3), "imbalance": round(max(work) / statistics.mean(work), 2)}


async def wait_healthy(url: str) -> None:
    """Wait until the address answers 200. Raises TimeoutError."""
    async with asyncio.timeout(READY_SECONDS), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


@asynccontextmanager
async def router(name: str, cluster: LocalCluster, manifest: Manifest, sglang: Environment | None) -> AsyncIterator[Target]:
    """Run the router `name` in front of the workers."""
    service = manifest.services[0]
    cluster.apply(with_policy(manifest, name if name in OURS else "RoundRobin"))
    await cluster.wait_ready(READY_SECONDS)
    url = cluster.urls[service.name]
    await wait_usable(url, WORKERS, READY_SECONDS)
    if name in OURS:
        yield Target(url, service.served_model_name)
        return
    async with aiohttp.ClientSession() as session, session.get(f"{url}/fairlead/workers") as answer:
        addresses = [worker["address"] for worker in (await answer.json())["workers"]]
    assert sglang is not None, "its environment was made"
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()), "--policy", "cache_aware"]
        start = [str(sglang.python), "-m", "sglang_router.launch_router", *flags, "--worker-urls"]
        with Running(Command([*start, *(f"http://{address}" for address in addresses)]), port, Path(folder) / "router.log"):
            await wait_healthy(f"http://127.0.0.1:{port}/health")
            yield Target(f"http://127.0.0.1:{port}", service.served_model_name)


async def compare(
    options: Any, names: Sequence[str], cluster: LocalCluster, manifest: Manifest, sglang: Environment | None, console: Console
) -> tuple[float, list[dict[str, Any]]]:
    """Return the capacity, and the figures of each run."""
    runs: list[dict[str, Any]] = []
    async with router("RoundRobin", cluster, manifest, None) as target:
        for seed in range(2):  # the second time, the caches hold what they can
            messages = questions(f"capacity {os.getpid()}", int(options.seconds * CAPACITY_RATE), seed)
            outcomes, seconds = await send(target, messages, float("inf"), seed)
    capacity = sum(outcome.success for outcome in outcomes) / seconds
    console.print(f"capacity with RoundRobin: {capacity:.2f} requests/s")
    for repeat in range(options.repeats):
        for load in options.loads:
            order: Callable[[Sequence[str]], Sequence[str]] = (lambda each: each) if repeat % 2 == 0 else (lambda each: each[::-1])
            for name in order(names):
                run = f"{name} {load} {repeat} {os.getpid()}"
                async with router(name, cluster, manifest, sglang) as target:
                    await send(target, questions(f"warm-up of {run}", WARM_UP, repeat), capacity / 2, repeat)
                    messages = questions(run, max(20, round(options.seconds * load * capacity)), repeat)
                    url = cluster.urls[manifest.services[0].name]
                    before = await fleet_tokens(url)
                    outcomes, _ = await send(target, messages, load * capacity, repeat)
                    await asyncio.sleep(1.5)  # the router reads the workers' loads once a second
                    tokens = computed(before, await fleet_tokens(url))
                arrival = len(messages) / (load * capacity)
                runs.append({"router": name, "load": load, "repeat": repeat} | figures(outcomes, arrival, options.slo) | tokens)
                console.print(runs[-1])
    return capacity, runs


async def measure(options: Any, names: Sequence[str], sglang: Environment | None, console: Console) -> tuple[float, list[dict[str, Any]]]:
    root = make_demo_model(default_root(), console)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "overload.yaml"
        path.write_text(MANIFEST)
        manifest = read_manifest(path)
    cluster = LocalCluster("overload", port=free_router_port(set()), host_env=dict(os.environ), cpus=os.cpu_count() or 1, model_root=root)
    async with cluster:
        async with router("RoundRobin", cluster, manifest, None):
            pass  # the workers are ready
        workers = [pod.pid for pod in cluster.kubelet.pods("worker") if pod.pid is not None]
        with limit_cpu(workers, options.cores):
            capacity, runs = await compare(options, names, cluster, manifest, sglang, console)
    return capacity, runs


def report(names: Sequence[str], loads: Sequence[float], runs: Sequence[dict[str, Any]], console: Console) -> dict[str, Any]:
    """Print and return the medians over the repeats for each load and router."""
    table = Table(
        "load", "router", "TTFT p50 (s)", "TTFT p99 (s)", "goodput (1/s)", "refused", "cached", "imbalance", box=None, header_style="dim"
    )
    medians: dict[str, Any] = {}
    for load in loads:
        for name in names:
            each = [run for run in runs if run["router"] == name and run["load"] == load]
            row = {key: statistics.median(run[key] for run in each) for key in FIGURES}
            medians[f"{load:g} {name}"] = row
            table.add_row(f"{load:g}", name, *(f"{row[key]:g}" for key in FIGURES))
    console.print(table)
    return medians


def main() -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="arrival time of each run")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.7, 1.0, 1.5], help="multiples of the capacity")
    parser.add_argument("--cores", type=float, default=0.4, help="CPU limit of each worker; the router and the client need the rest")
    parser.add_argument("--slo", type=float, default=2.0, help="seconds to the first token that count as good")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where sglang-router is installed")
    parser.add_argument("--quick", action="store_true", help="one short repeat: does it run")
    parser.add_argument("--routers", nargs="+", choices=[*OURS, SGLANG], default=[*OURS, SGLANG])
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.seconds, options.loads = 1, 6.0, [1.0]
    console = Console(width=150)
    names, sglang = list(options.routers), None
    try:
        sglang = make(SGLANG, options.cache) if SGLANG in names else None
    except NotMade as error:
        names.remove(SGLANG)
        console.print(f"{SGLANG} is left out: {error}", markup=False)
    capacity, runs = asyncio.run(measure(options, names, sglang, console))
    medians = report(names, options.loads, runs, console)
    write_report(__name__, options, {"capacity": capacity, "medians": medians, "runs": runs})
    return 0
