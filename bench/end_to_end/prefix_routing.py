"""TTFT and prefill tokens with PrefixAware and RoundRobin routing: four real workers, many growing conversations.

The workers run throughout. Only the router changes between runs, and the two policies alternate. Every run's prompts begin with its own
name, so no run finds cached blocks of another. Prefill tokens come from the workers' counters: prompt tokens less cached tokens. On a
shared machine only the ratios are meaningful. The exit status is 1 if a target is missed.
"""

import asyncio
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from bench.common.report import make_parser, write_report
from fairlead.demo.command import default_root, make_demo_model, with_policy
from fairlead.demo.compare import later_turns, returned_to_pod
from fairlead.demo.conversations import Conversation
from fairlead.demo.play import Turn, play
from fairlead.local.cluster import LocalCluster
from fairlead.local.kubelet import free_port
from fairlead.local.manifest import Manifest, read_manifest

POLICIES = ("PrefixAware", "RoundRobin")
WORKERS = 4
DOCUMENT_CHARACTERS = 2600
QUESTIONS = (
    "What is this text about, in one sentence?",
    "Which of its rules would you check first in a review, and why?",
    "Give a short example that follows it.",
    "And one that does not.",
    "What has changed about this over the years?",
)
BAR = 0.5
"""Upper limits of PrefixAware / RoundRobin: the median TTFT, and the fleet's prefill tokens."""
MANIFEST = f"""
apiVersion: fairlead.dev/v1alpha1
kind: InferenceService
metadata: {{name: engines}}
spec:
  model: {{uri: "file:///models/demo"}}
  replicas: {WORKERS}
  resources: {{gpus: 0}}
  engine:
    kvCache: {{pageTokens: 16, blockTokens: 16, pages: 1024}}
    args: ["--threads", "1"]
  routing: {{policy: PrefixAware, replicas: 1}}
"""


def people(run: str, count: int) -> list[Conversation]:
    """Return `count` conversations: each user has a document of about 650 tokens and questions about it."""
    documents = [text.strip()[:DOCUMENT_CHARACTERS] for _, text in sorted(topics.items()) if len(text) > DOCUMENT_CHARACTERS]
    assert count <= len(documents), f"at most {len(documents)} users"
    return [
        Conversation(f"user {number}", f"[{run}, user {number}] Answer questions about this text.\n\n{document}", QUESTIONS)
        for number, document in enumerate(documents[:count])
    ]


async def prefill_tokens(session: aiohttp.ClientSession, router: str) -> int:
    """Return the prefill tokens that all workers computed since their start."""
    async with session.get(f"{router}/fairlead/workers") as answer:
        addresses = [worker["address"] for worker in (await answer.json())["workers"]]
    total = 0.0
    for address in addresses:
        async with session.get(f"http://{address}/metrics") as answer:
            families = {family.name: family for family in text_string_to_metric_families(await answer.text())}
        prompt, hits = (families[f"fairlead_{name}"].samples[0].value for name in ("prompt_tokens", "prefix_cache_hits"))
        total += prompt - hits
    return int(total)


async def hold(cluster: LocalCluster, manifest: Manifest, policy: str, run: str, users: int) -> dict[str, Any]:
    """Play all conversations through a router with this policy."""
    service = manifest.services[0]
    cluster.apply(with_policy(manifest, policy))
    await cluster.wait_ready(300)
    url = cluster.urls[service.name]
    async with aiohttp.ClientSession() as session:
        before = await prefill_tokens(session, url)
        began = asyncio.get_running_loop().time()
        turns = await play(url, service.served_model_name, people(run, users), lambda turn: None, pause=0.3)
        seconds = asyncio.get_running_loop().time() - began
        computed = await prefill_tokens(session, url) - before
    return {"policy": policy, "prefill_tokens": computed, "seconds": round(seconds, 2)} | figures(turns)


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    back, firsts = returned_to_pod(turns), [turn.ttft for turn in turns]
    return {
        "requests": len(turns),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "ttft_p50_ms": round(1000 * statistics.median(firsts), 1),
        "ttft_p90_ms": round(1000 * statistics.quantiles(firsts, n=10)[-1], 1),
        "ttft_p50_later_turns_ms": round(1000 * statistics.median(turn.ttft for turn in later_turns(turns)), 1),
        "returned_share": round(sum(back) / len(back), 3),
    }


async def measure(repeats: int, users: int, console: Console) -> list[dict[str, Any]]:
    root = make_demo_model(default_root(), console)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engines.yaml"
        path.write_text(MANIFEST)
        manifest = read_manifest(path)
    cluster = LocalCluster("engines", port=free_port(set()), host_env=dict(os.environ), cpus=os.cpu_count() or 1, model_root=root)
    runs = []
    async with cluster:
        for policy in POLICIES:  # each once, unmeasured: first steps of the engines, and the worker's rate
            await hold(cluster, manifest, policy, f"{policy} warm-up {os.getpid()}", 4)
        for repeat in range(repeats):
            for policy in POLICIES if repeat % 2 == 0 else POLICIES[::-1]:
                runs.append({"repeat": repeat} | await hold(cluster, manifest, policy, f"{policy} {repeat} {os.getpid()}", users))
                console.print(runs[-1])
    return runs


def ratios(runs: Sequence[dict[str, Any]], figure: str) -> list[float]:
    """Return PrefixAware / RoundRobin for each repeat."""
    ours, theirs = ([run[figure] for run in sorted(runs, key=lambda run: run["repeat"]) if run["policy"] == policy] for policy in POLICIES)
    return [round(left / right, 3) for left, right in zip(ours, theirs, strict=True)]


def main() -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--users", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="one repeat with few users: does it run")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.users = 1, 4
    console = Console(width=150)
    runs = asyncio.run(measure(arguments.repeats, arguments.users, console))
    table = Table("PrefixAware / RoundRobin", "median", "repeats", "bar", box=None, header_style="dim")
    summary: dict[str, Any] = {}
    for figure in ("ttft_p50_ms", "prefill_tokens", "ttft_p90_ms", "seconds"):
        each = ratios(runs, figure)
        summary[figure] = {"ratios": each, "median": statistics.median(each)}
        bar = f"{BAR:g}" if figure in ("ttft_p50_ms", "prefill_tokens") else ""
        table.add_row(figure, f"{statistics.median(each):.3f}", str(each), bar)
    console.print(table)
    kept = all(summary[figure]["median"] <= BAR for figure in ("ttft_p50_ms", "prefill_tokens"))
    report = {"workers": WORKERS, "users": arguments.users, "bar": BAR, "kept": kept, "ratios": summary, "runs": runs}
    write_report(__name__, arguments, report)
    console.print("kept" if kept else "NOT kept")
    return int(not kept)
