"""TTFT of interactive requests beside a batch and without, and the idle capacity that the batch uses.

One real worker behind Fairlead's router and batch server. Lines of the batch have the shape of the interactive requests, so that a
request is the unit of capacity. Prompts are new to every cache. Each repeat has three stretches:

1. **capacity**: what the worker completes per second when requests without a class come all at once
2. **alone**: interactive requests at `--load` times that capacity, as an open-loop Poisson process
3. **beside**: the same arrivals while a batch runs, created with the Batch API

Every other repeat measures 3 before 2. The idle capacity is the capacity less the interactive rate. The share that the batch used is the
rate of its completed lines over the idle capacity. Figures are medians of the repeats' ratios, so a busy machine matters less.
"""

import asyncio
import json
import os
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from bench.common.report import make_parser, write_report
from fairlead.bench.client import Outcome, complete
from fairlead.bench.datasets import Prompt
from fairlead.bench.load import schedule_arrivals
from fairlead.demo.command import default_root, make_demo_model
from fairlead.demo.play import wait_usable
from fairlead.local.cluster import LocalCluster
from fairlead.local.kubelet import free_port
from fairlead.local.manifest import read_manifest

ENDPOINT = "/v1/completions"
RUNNING = ("validating", "in_progress")
READY_SECONDS = 300.0
WARM_UP = 16
"""Requests of the first burst, unmeasured: the router learns the worker's rate."""
MANIFEST = """
apiVersion: fairlead.dev/v1alpha1
kind: InferenceService
metadata: {name: interference}
spec:
  model: {uri: "file:///models/demo"}
  resources: {gpus: 0}
  engine:
    kvCache: {pageTokens: 16, blockTokens: 16, pages: 2048}
    args: ["--threads", "1"]
  routing: {replicas: 1}
  batch: {storageURI: "pvc://batches", maxConcurrency: 64}
"""


class Client:
    """Requests to one service, and batches of them. All have prompts of `prompt_tokens` random ids and answers of `reply_tokens`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, options: Any) -> None:
        self._session, self._url = session, url
        self._prompt_tokens, self._reply_tokens = options.prompt_tokens, options.reply_tokens
        self._random = random.Random(os.urandom(8))

    def body(self) -> dict[str, Any]:
        prompt = [self._random.randrange(300, 1900) for _ in range(self._prompt_tokens)]
        return {"model": "interference", "prompt": prompt, "max_tokens": self._reply_tokens, "temperature": 0, "ignore_eos": True}

    async def send(self, count: int, rate: float, seed: int) -> tuple[list[Outcome], float]:
        """Send `count` streams at `rate` per second. Return the outcomes, and the seconds until the last one."""
        times = schedule_arrivals([Prompt((), self._reply_tokens)] * count, rate=rate, burstiness=1.0, seed=seed)
        clock = asyncio.get_running_loop().time
        began = clock()

        async def one(at: float) -> Outcome:
            body = self.body() | {"stream": True}
            await asyncio.sleep(max(0.0, began + at - clock()))
            return await complete(self._session, self._url + ENDPOINT, body, self._prompt_tokens)

        outcomes = await asyncio.gather(*(one(at) for at in times))
        return outcomes, clock() - began

    @asynccontextmanager
    async def batch(self, count: int) -> AsyncIterator[str]:
        """Run a batch of `count` lines from its first answers on; cancel it at the end."""
        lines = ({"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": self.body()} for number in range(count))
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(map(json.dumps, lines)), filename="lines.jsonl")
        file = await self._call("POST", "/v1/files", data=form)
        batch = await self._call(
            "POST", "/v1/batches", json={"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        )
        path = f"/v1/batches/{batch['id']}"
        try:
            await self._wait_for_lines(batch["id"], WARM_UP)
            yield batch["id"]
        finally:
            if (await self._call("GET", path))["status"] in RUNNING:
                await self._call("POST", f"{path}/cancel")
            while True:
                if (await self._call("GET", path))["status"] not in (*RUNNING, "finalizing", "cancelling"):
                    break
                await asyncio.sleep(0.1)

    async def completed(self, batch: str) -> int:
        """Return how many lines of the batch are answered. Raises RuntimeError if it does not run."""
        state = await self._call("GET", f"/v1/batches/{batch}")
        if state["status"] not in RUNNING:
            raise RuntimeError(f"batch {batch} is {state['status']} before the end of its stretch: {state['request_counts']}")
        return int(state["request_counts"]["completed"])

    async def _wait_for_lines(self, batch: str, count: int) -> None:
        while True:
            if await self.completed(batch) >= count:
                return
            await asyncio.sleep(0.1)

    async def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        async with self._session.request(method, self._url + path, **arguments) as answer:
            answer.raise_for_status()
            reply: dict[str, Any] = await answer.json()
            return reply


def percentiles(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the TTFT of a stretch in ms. Raises RuntimeError if a request failed."""
    if failed := [outcome.error for outcome in outcomes if not outcome.success]:
        raise RuntimeError(f"{len(failed)} of {len(outcomes)} interactive requests failed: {failed[0]}")
    ttft = sorted(1000 * outcome.ttft for outcome in outcomes)
    return {"p50": statistics.median(ttft), "p95": ttft[int(0.95 * (len(ttft) - 1))]}


async def repeat(client: Client, options: Any, seed: int) -> dict[str, float]:
    """Measure one repeat: TTFT in ms, ratios, and rates in requests per second."""
    outcomes, seconds = await client.send(options.burst, float("inf"), seed)
    percentiles(outcomes)
    capacity = len(outcomes) / seconds
    rate = options.load * capacity
    count = max(10, round(options.seconds * rate))
    alone: dict[str, float] = {}
    beside: dict[str, float] = {}
    lines = 0.0
    for with_batch in (False, True) if seed % 2 == 0 else (True, False):
        if not with_batch:
            alone = percentiles((await client.send(count, rate, seed))[0])
            continue
        async with client.batch(round(WARM_UP + 4 * options.seconds * capacity)) as batch:
            before = await client.completed(batch)
            outcomes, seconds = await client.send(count, rate, seed)
            lines = (await client.completed(batch) - before) / seconds
            beside, rate_beside = percentiles(outcomes), count / seconds
    return {
        "capacity": capacity,
        "interactive": rate_beside,
        "batch": lines,
        "used": lines / (capacity - rate_beside),
        **{f"{name}_{side}": each[name] for name in alone for side, each in (("alone", alone), ("beside", beside))},
        **{f"{name}_ratio": beside[name] / alone[name] for name in alone},
    }


async def measure(options: Any, console: Console) -> list[dict[str, float]]:
    models = make_demo_model(default_root(), console)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "models").symlink_to(models / "models")
        (root / "batches").mkdir()
        (root / "service.yaml").write_text(MANIFEST)
        manifest = read_manifest(root / "service.yaml")
        cluster = LocalCluster("interference", port=free_port(set()), host_env=dict(os.environ), cpus=os.cpu_count() or 1, model_root=root)
        async with (
            cluster,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            cluster.apply(manifest)
            await cluster.wait_ready(READY_SECONDS)
            url = cluster.urls[manifest.services[0].name]
            await wait_usable(url, 1, READY_SECONDS)
            client = Client(session, url, options)
            await client.send(WARM_UP, float("inf"), 0)
            runs = []
            for seed in range(options.repeats):
                runs.append(await repeat(client, options, seed))
                console.print({key: round(value, 2) for key, value in runs[-1].items()})
            return runs


def report(runs: Sequence[dict[str, float]], console: Console) -> dict[str, float]:
    """Print and return the medians of the repeats."""
    medians = {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
    table = Table("TTFT (ms)", "alone", "beside a batch", "ratio", box=None, header_style="dim")
    for name in ("p50", "p95"):
        table.add_row(name, *(f"{medians[f'{name}_{column}']:.3g}" for column in ("alone", "beside", "ratio")))
    console.print(table)
    console.print(f"the batch used {medians['used']:.0%} of the idle capacity: {medians['batch']:.2f} lines/s beside", end=" ")
    console.print(f"{medians['interactive']:.2f} requests/s, of {medians['capacity']:.2f}")
    return medians


def main() -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=30.0, help="arrival time of each stretch")
    parser.add_argument("--load", type=float, default=0.3, help="interactive requests, as a multiple of the capacity")
    parser.add_argument("--burst", type=int, default=60, help="requests of a stretch that measures the capacity")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--reply-tokens", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="one short repeat: does it run")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.seconds, options.burst = 1, 5.0, 20
    console = Console(width=150)
    runs = asyncio.run(measure(options, console))
    write_report(__name__, options, {"medians": report(runs, console), "runs": runs})
    return 0
