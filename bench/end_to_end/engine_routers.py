"""Round robin, sglang-router, vLLM's router and Fairlead's in turns, in front of the same two vLLM engines.

The engines run throughout, with their agents; only the router changes. The peers reach the engines directly: with their cache-aware
policies, and vLLM's router also with its policy by KV events. Fairlead's router reaches them through their agents. Each run's prompts begin
with its own name, so no run finds blocks of another. The order of the routers reverses from repeat to repeat. Prefill tokens come from the
engines' counters: prompt tokens less cached ones. Their floor is what one engine with an unlimited cache computes of the same prompts. On a
shared machine only ratios of one repeat are meaningful. The exit status is 1 if a target is missed: prefill tokens and TTFT at most 0.9 of
the best other router's with chats and shared prefixes, and at most 1.05 with random prompts.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import zmq
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table
from tests.servers.redis_server import RedisServer, free_port
from zmq.devices import ThreadProxy

from bench.common.report import make_parser, write_report
from bench.other_servers.environments import make
from bench.other_servers.vllm_engines import MODEL, Process, agent_command, wait_ready
from fairlead.random_model import make_model
from fairlead_common.prompts.encoder import PromptEncoder, PromptFormat
from fairlead_index.hashing import block_hashes

OURS, ROUND_ROBIN, KV_EVENTS = "fairlead", "round-robin", "vllm-router-kv"
ROUTERS = (ROUND_ROBIN, "sglang-router", "vllm-router", KV_EVENTS, OURS)
LIMITS = {"chats": 0.9, "shared": 0.9, "random": 1.05}
"""Upper limits of Fairlead's figure by the best of the other routers."""
FIGURES = ("ttft_p50", "ttft_p99", "prefill_tokens")
"""Figures that are compared."""
CACHE = Path.home() / ".cache" / "fairlead" / "peers"
PODS = 2
WORDS = ("fox", "lazy", "dog", "wizards", "potions", "moonlight", "rivers", "the quick brown", "jumps over", "while seven", "near old")


class Floor:
    """The tokens that one engine with an unlimited cache would compute of the requests of a run. Counted after it: it takes CPU time."""

    def __init__(self) -> None:
        self._sent: list[tuple[bool, list[dict[str, str]]]] = []

    def add_prompt(self, messages: list[dict[str, str]]) -> None:
        self._sent.append((True, messages[:]))

    def add_held(self, messages: list[dict[str, str]]) -> None:
        """Note that an engine holds these messages from now on."""
        self._sent.append((False, messages))

    def count(self, format: PromptFormat) -> int:
        encoder, size, seen, total = PromptEncoder(format), format.block_tokens, set[int](), 0
        for is_prompt, messages in self._sent:
            tokens = encoder.encode_chat(messages)
            blocks = block_hashes(0, tokens, size)
            if is_prompt:
                reusable = blocks[: (len(tokens) - 1) // size]  # the last token is always computed
                cached = next((number for number, block in enumerate(reusable) if block not in seen), len(reusable))
                total += len(tokens) - cached * size
            seen.update(blocks)
        return total


@dataclass(frozen=True)
class Client:
    """A client that sends one request after the other."""

    session: aiohttp.ClientSession
    url: str
    ttfts: list[float]
    floor: Floor | None = None

    async def chat(self, messages: list[dict[str, str]], max_tokens: int) -> str:
        """Stream a chat and return its text. Raises RuntimeError for anything but a complete stream."""
        body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        if self.floor is not None:
            self.floor.add_prompt(messages)
        text, finish, began, first = "", None, time.monotonic(), 0.0
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {(await answer.text())[:300]}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    if choice["delta"].get("content") and not first:
                        first = time.monotonic() - began
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
        if finish != "length":
            raise RuntimeError(f"the stream ended with finish reason {finish}")
        self.ttfts.append(first or time.monotonic() - began)
        if self.floor is not None:
            self.floor.add_held([*messages, {"role": "assistant", "content": text}])
        return text


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count))


async def play_chats(clients: Sequence[Client], run: str, seed: int, scale: int) -> None:
    """Each client has its own long system prompt, and asks five questions with pauses in between."""

    async def play(number: int, client: Client) -> None:
        for chat in range(scale):
            draw = random.Random(f"{seed} {number} {chat}")
            messages = [{"role": "system", "content": f"[{run}, {number}, {chat}] {words(draw, 260)}"}]
            for _ in range(5):
                messages.append({"role": "user", "content": words(draw, 30)})
                messages.append({"role": "assistant", "content": await client.chat(messages, draw.randrange(4, 17))})
                await asyncio.sleep(draw.uniform(0.2, 1.5))

    await asyncio.gather(*(play(number, client) for number, client in enumerate(clients)))


async def play_shared(clients: Sequence[Client], run: str, seed: int, scale: int) -> None:
    """All clients ask single questions about one of eight long texts."""
    texts = [f"[{run}, {number}] {words(random.Random(f'{seed} {number}'), 300)}" for number in range(8)]

    async def play(number: int, client: Client) -> None:
        draw = random.Random(f"{seed} client {number}")
        for _ in range(5 * scale):
            messages = [{"role": "system", "content": draw.choice(texts)}, {"role": "user", "content": words(draw, 20)}]
            await client.chat(messages, 4)
            await asyncio.sleep(draw.uniform(0.2, 1.5))

    await asyncio.gather(*(play(number, client) for number, client in enumerate(clients)))


async def play_random(clients: Sequence[Client], run: str, seed: int, scale: int) -> None:
    """No two prompts share a block."""

    async def play(number: int, client: Client) -> None:
        draw = random.Random(f"{seed} random {number}")
        for turn in range(5 * scale):
            await client.chat([{"role": "user", "content": f"[{run}, {number}, {turn}] {words(draw, draw.randrange(50, 260))}"}], 4)
            await asyncio.sleep(draw.uniform(0.2, 1.5))

    await asyncio.gather(*(play(number, client) for number, client in enumerate(clients)))


WORKLOADS: dict[str, Callable[[Sequence[Client], str, int, int], Any]] = {
    "chats": play_chats,
    "shared": play_shared,
    "random": play_random,
}


def events_endpoint(pod: int, scratch: Path) -> str:
    """Return where an engine publishes its KV events. An engine binds such a socket, so it can have several subscribers."""
    return f"ipc://{scratch}/events-{pod}"


def publish_on_loopback(endpoint: str, port: int) -> None:
    """Forward KV events to a port until this process ends: vLLM's router takes TCP only, and vLLM binds TCP on all addresses only."""
    proxy = ThreadProxy(zmq.XSUB, zmq.XPUB)  # type: ignore[no-untyped-call]  # pyzmq
    proxy.connect_in(endpoint)
    proxy.bind_out(f"tcp://127.0.0.1:{port}")
    proxy.start()


def router_command(name: str, port: int, ports: Sequence[dict[str, int]], redis: str, options: Any) -> list[str]:
    """Return the command line of a router in front of the engines or, for Fairlead's, of their agents."""
    if name in (OURS, ROUND_ROBIN):
        workers = ",".join(f"127.0.0.1:{each['agent']}" for each in ports)
        policy = "PrefixAware" if name == OURS else "RoundRobin"
        own = [sys.executable, "-m", "fairlead_router.main", "--host", "127.0.0.1", "--port", str(port), "--redis-url", redis]
        return [*own, "--workers", f"static://{workers}", "--index-namespace", "bench/engines", "--policy", policy, "--drain-grace", "0"]
    environment = make("vllm-router" if name == KV_EVENTS else name, options.cache)
    start = [str(environment.tool("vllm-router"))]
    if name == "sglang-router":
        start = [str(environment.python), "-m", "sglang_router.launch_router"]
    urls = [f"http://127.0.0.1:{each['engine']}" for each in ports]
    routing = ["--policy", "cache_aware"]
    if name == KV_EVENTS:
        routing = ["--policy", "kv_aware", "--kv-event-block-size", str(options.block), "--kv-event-model", MODEL]
        for each, url in zip(ports, urls, strict=True):
            routing += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{each['events']}"]
    listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return [*start, *listen, *routing, "--worker-urls", *urls]


@asynccontextmanager
async def running_router(session: aiohttp.ClientSession, command: list[str], port: int, scratch: Path, name: str) -> AsyncIterator[str]:
    """Run a router until the block ends, and wait until it answers a request."""
    url = f"http://127.0.0.1:{port}"
    with Process(name, command, dict(os.environ), scratch) as process:
        async with asyncio.timeout(120):
            while True:
                process.check()
                try:
                    await Client(session, url, []).chat([{"role": "user", "content": "Hello"}], 1)
                    break
                except (aiohttp.ClientError, RuntimeError):
                    await asyncio.sleep(0.5)
        await asyncio.sleep(2)  # each router polls the engines' state
        yield url


async def prefill_tokens(session: aiohttp.ClientSession, ports: Sequence[dict[str, int]]) -> int:
    """Return the prompt tokens that the engines have computed since their start."""
    total = 0.0
    for each in ports:
        async with session.get(f"http://127.0.0.1:{each['engine']}/metrics") as answer:
            families = text_string_to_metric_families(await answer.text())
            values = {sample.name: sample.value for family in families for sample in family.samples}
        total += values["vllm:prompt_tokens_total"] - values["vllm:prefix_cache_hits_total"]
    return int(total)


async def prompt_format(session: aiohttp.ClientSession, url: str) -> PromptFormat:
    """Return how prompts become tokens, from an agent."""
    async with session.get(f"{url}/internal/prompt-format") as answer:
        return msgspec.json.decode(await answer.read(), type=PromptFormat)


async def measure(options: Any, scratch: Path, console: Console) -> list[dict[str, Any]]:
    """Start the engines, run each workload through each router, and return the figures of each run."""
    engine = make("vllm", options.cache).tool("vllm")
    model = make_model(options.cache / "engine-routers-model", hidden=512, layers=6, heads=8, kv_heads=2, seed=1)
    runs = []
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        ports = [{name: free_port() for name in ("engine", "agent", "events", "replay")} for _ in range(PODS)]
        pods = []
        for pod in range(PODS):
            command, env = agent_command(engine, model, pod, ports[pod], options, redis.url, events_endpoint(pod, scratch))
            pods.append(stack.enter_context(Process(f"pod-{pod}", command, env, scratch)))
            publish_on_loopback(events_endpoint(pod, scratch), ports[pod]["events"])
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)))
        for each in ports:
            await wait_ready(session, f"http://127.0.0.1:{each['agent']}", pods)
        format = await prompt_format(session, f"http://127.0.0.1:{ports[0]['agent']}")
        for repeat in range(-1, options.repeats):  # the first is a warm-up
            for name in options.routers if repeat % 2 == 0 else options.routers[::-1]:
                port = free_port()
                command = router_command(name, port, ports, redis.url, options)
                async with running_router(session, command, port, scratch, name) as url:
                    for workload in options.workloads:
                        floor = Floor()
                        clients = [Client(session, url, [], floor) for _ in range(options.clients)]
                        before, began = await prefill_tokens(session, ports), time.monotonic()
                        run = f"{name} {workload} {repeat} {os.getpid()}"
                        await WORKLOADS[workload](clients, run, repeat, options.scale if repeat >= 0 else 1)
                        ttfts = sorted(ttft for client in clients for ttft in client.ttfts)
                        if repeat < 0:
                            continue
                        runs.append(
                            {
                                "repeat": repeat,
                                "router": name,
                                "workload": workload,
                                "requests": len(ttfts),
                                "ttft_p50": round(statistics.median(ttfts), 4),
                                "ttft_p99": round(ttfts[int(0.99 * (len(ttfts) - 1))], 4),
                                "prefill_tokens": await prefill_tokens(session, ports) - before,
                                "floor_tokens": floor.count(format),
                                "seconds": round(time.monotonic() - began, 1),
                            }
                        )
                        console.print(json.dumps(runs[-1]), soft_wrap=True)
    return runs


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the median of each figure by workload and router."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for workload in dict.fromkeys(run["workload"] for run in runs):
        for router in dict.fromkeys(run["router"] for run in runs):
            same = [run for run in runs if run["workload"] == workload and run["router"] == router]
            medians = {figure: float(statistics.median(run[figure] for run in same)) for figure in (*FIGURES, "floor_tokens")}
            found.setdefault(workload, {})[router] = medians
    return found


def ratios(medians: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return Fairlead's figures by those of the best other router."""
    others = [figures for router, figures in medians.items() if router != OURS]
    return {figure: round(medians[OURS][figure] / min(other[figure] for other in others), 3) for figure in FIGURES}


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--repeats", type=int, default=3, help="measured runs of each router")
    parser.add_argument("--clients", type=int, default=12, help="clients that send one request at a time")
    parser.add_argument("--scale", type=int, default=2, help="factor of the requests of a run")
    parser.add_argument("--block", type=int, default=32, help="tokens of a KV block")
    parser.add_argument("--blocks", type=int, default=400, help="KV blocks of each engine")
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--quick", action="store_true", help="one short repeat: does it run")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where vLLM, the routers and the model are kept")
    options = parser.parse_args()
    if options.quick:
        options.repeats = options.scale = 1
    scratch = Path(tempfile.mkdtemp(prefix="engine-routers-"))
    console = Console(width=140)
    console.print(f"== logs in {scratch}")
    runs = asyncio.run(measure(options, scratch, console))
    medians = summarize(runs)
    table = Table("workload", "router", "TTFT p50", "TTFT p99", "prefill tokens", "floor")
    for workload, by_router in medians.items():
        for router, figures in by_router.items():
            row = [f"{figures['ttft_p50']:.3f} s", f"{figures['ttft_p99']:.3f} s", f"{figures['prefill_tokens']:.0f}"]
            row.append(f"{figures['floor_tokens']:.0f}")
            table.add_row(workload, router, *row)
    console.print(table)
    compared = {workload: ratios(by_router) for workload, by_router in medians.items() if OURS in by_router and len(by_router) > 1}
    for workload, figures in compared.items():
        console.print(f"{workload}: Fairlead by the best other router {figures}, limit {LIMITS[workload]}")
    write_report(__name__, options, {"runs": runs, "medians": medians, "ratios": compared})
    sys.exit(any(value > LIMITS[workload] for workload, figures in compared.items() for value in figures.values()))


if __name__ == "__main__":
    main()
