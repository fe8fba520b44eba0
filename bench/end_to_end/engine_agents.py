"""Predicted against actual cached tokens of two vLLM engines with agents, with eviction, LoRA and salts.

They are behind the router, on a CPU. The engines have a tiny model with random weights and a small KV cache, so that blocks are evicted
all the time. Conversations take turns, with shared system prompts, adapters and salts. Each answer tells what the router predicted and
what the engine found in its cache. The exit status is 1 if fewer than 99 % of the predictions are within one block of the engine, or a
conversation seldom returns to its pod.
"""

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from rich.console import Console
from rich.table import Table
from tests.lora import save_adapter
from tests.servers.redis_server import RedisServer, free_port
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from bench.common.report import make_parser, write_report
from bench.other_servers.environments import make
from fairlead.random_model.tokenizer import END_OF_TEXT, IM_END, SPECIAL_TOKENS, save_tokenizer

CACHE = Path.home() / ".cache" / "fairlead" / "peers"
MODEL, ADAPTERS = "tiny", ("sql", "poems")
PODS = 2
MIN_WITHIN, MIN_RETURNED = 0.99, 0.9
READY_SECONDS = 900.0
WORDS = (
    "fox",
    "lazy",
    "dog",
    "wizards",
    "potions",
    "moonlight",
    "rivers",
    "the quick brown",
    "jumps over",
    "while seven",
    "brew",
    "near old",
)


@dataclass
class Chat:
    """One conversation: its messages so far, and the pod of each turn."""

    number: int
    model: str
    salt: str
    turns: int
    messages: list[dict[str, str]]
    pods: list[str] = field(default_factory=list)


@dataclass
class Tally:
    """Figures of a run."""

    differences: list[int] = field(default_factory=list)
    """Predicted less actual cached tokens of each request."""
    cached: int = 0
    prompt: int = 0
    returned: int = 0
    later_turns: int = 0
    failed: int = 0
    unpredicted: int = 0
    """Requests that the router sent without an answer of the index."""
    kinds: Counter[str] = field(default_factory=Counter)


def make_model(folder: Path) -> Path:
    """Return the folder of a model with two layers, and with its adapters beside it. Create them if they do not exist."""
    if (folder / "done").exists():
        return folder / "model"
    shutil.rmtree(folder, ignore_errors=True)
    end, im_end = SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(IM_END)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    more = {"head_dim": 64, "vocab_size": 2048, "tie_word_embeddings": True, "max_position_embeddings": 4096, "initializer_range": 0.2}
    ends = {"bos_token_id": end, "eos_token_id": im_end, "pad_token_id": end}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **shape, **more, **ends), dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model", vocab=2048, max_positions=4096)
    for seed, name in enumerate(ADAPTERS):
        save_adapter(AutoModelForCausalLM.from_pretrained(folder / "model"), folder / name, seed, targets=["q_proj", "v_proj"])
    (folder / "done").touch()
    return folder / "model"


class Process:
    """A started program with its log. Leaving the context ends its process group."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], scratch: Path) -> None:
        self.log = scratch / f"{name}.log"
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=scratch)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        self._child.terminate()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, 9)
            self._child.wait()

    def check(self) -> None:
        """Raise RuntimeError with the end of the log if the process has ended."""
        if self._child.poll() is not None:
            raise RuntimeError(f"{self.log.name}: ended with {self._child.returncode}: {self.log.read_text()[-1500:]}")


def agent_command(
    engine: Path, model: Path, pod: int, ports: dict[str, int], options: Any, redis: str, adapters: bool = True, events: str = ""
) -> tuple[list[str], dict[str, str]]:
    """Return the command line and environment of an agent that runs a vLLM engine, by default with the adapters beside the model.

    `events`: where the engine publishes; empty: only its agent gets the events.
    """
    events, replay = events or f"tcp://127.0.0.1:{ports['events']}", f"tcp://127.0.0.1:{ports['replay']}"
    agent = [sys.executable, "-m", "fairlead_agent.main", "--model", str(model), "--served-model-name", MODEL]
    agent += ["--engine-url", f"http://127.0.0.1:{ports['engine']}", "--kv-events", events, "--kv-replay", replay]
    agent += ["--host", "127.0.0.1", "--port", str(ports["agent"]), "--pod-name", f"pod-{pod}", "--drain-timeout", "5"]
    agent += ["--redis-url", redis, "--index-namespace", "bench/engines", "--advertise", f"127.0.0.1:{ports['agent']}"]
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events, "replay_endpoint": replay}
    serve = [str(engine), "serve", str(model), "--served-model-name", MODEL, "--dtype", "bfloat16", "--host", "127.0.0.1"]
    serve += ["--port", str(ports["engine"]), "--max-model-len", "2048", "--enforce-eager", "--block-size", str(options.block)]
    serve += ["--num-gpu-blocks-override", str(options.blocks), "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(config)]
    if adapters:
        serve += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules"]
        serve += [f"{name}={model.parent / name}" for name in ADAPTERS]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(pod % 2),
    }
    return [*agent, "--", *serve], {**os.environ, **variables}


async def wait_ready(session: aiohttp.ClientSession, url: str, processes: list[Process]) -> None:
    """Wait until a server answers `/ready` with 200."""
    async with asyncio.timeout(READY_SECONDS):
        while True:
            for process in processes:
                process.check()
            try:
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)


async def play(session: aiohttp.ClientSession, url: str, options: Any, tally: Tally) -> None:
    """Run conversations, `--concurrency` at a time, until `--requests` have been answered."""
    draw = random.Random(options.seed)
    systems = [_text(draw, 120) for _ in range(4)]
    active: list[Chat] = []
    sent = number = 0

    async def turn(chat: Chat) -> None:
        chat.messages.append({"role": "user", "content": _text(draw, draw.randrange(5, 60))})
        body: dict[str, Any] = {"model": chat.model, "messages": chat.messages, "max_tokens": draw.randrange(1, 24), "temperature": 0.8}
        body |= {"cache_salt": chat.salt} if chat.salt else {}
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            document = await answer.json()
            if answer.status != 200 or "x-fairlead-cached-tokens" not in answer.headers:
                tally.failed += 1
                print(answer.status, str(document)[:300])
                return
            cached = int(answer.headers["x-fairlead-cached-tokens"])
            if (predicted := answer.headers.get("x-fairlead-predicted-tokens")) is None:
                tally.unpredicted += 1
            else:
                tally.differences.append(int(predicted) - cached)
            tally.cached, tally.prompt = tally.cached + cached, tally.prompt + document["usage"]["prompt_tokens"]
            tally.kinds["adapter" if chat.model != MODEL else "base"] += 1
            tally.kinds["salted"] += bool(chat.salt)
            pod = answer.headers["x-fairlead-pod"]
            if chat.pods:
                tally.later_turns += 1
                tally.returned += pod == chat.pods[-1]
            chat.pods.append(pod)
            chat.messages.append({"role": "assistant", "content": document["choices"][0]["message"]["content"] or ""})

    async def worker() -> None:
        nonlocal sent, number
        while sent < options.requests:
            sent += 1
            waiting = [chat for chat in active if len(chat.pods) < chat.turns]
            if len(waiting) < options.chats:
                model, salt = draw.choice([MODEL, MODEL, *ADAPTERS]), draw.choice(["", "", "alice", "bob"])
                chat = Chat(number, model, salt, draw.randrange(2, 6), [{"role": "system", "content": draw.choice(systems)}])
                number += 1
            else:
                chat = draw.choice(waiting)
                active.remove(chat)
            await turn(chat)
            await asyncio.sleep(options.pause)
            if len(chat.pods) < chat.turns and len(chat.messages) < 12:
                active.append(chat)

    await asyncio.gather(*(worker() for _ in range(options.concurrency)))


def _text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


async def run(options: Any, scratch: Path) -> dict[str, Any]:
    """Start everything, play the conversations, and return the figures."""
    engine = make("vllm", options.cache).tool("vllm")
    model = make_model(options.cache / "tiny-agent-model")
    with RedisServer() as redis:
        ports = [{name: free_port() for name in ("engine", "agent", "events", "replay")} for _ in range(PODS)]
        pods = []
        for pod in range(PODS):
            command, env = agent_command(engine, model, pod, ports[pod], options, redis.url)
            pods.append(Process(f"pod-{pod}", command, env, scratch))
        port = free_port()
        workers = ",".join(f"127.0.0.1:{each['agent']}" for each in ports)
        router = [sys.executable, "-m", "fairlead_router.main", "--host", "127.0.0.1", "--port", str(port), "--redis-url", redis.url]
        router += ["--workers", f"static://{workers}", "--index-namespace", "bench/engines", "--hold-timeout", "30"]
        pods.append(Process("router", router, dict(os.environ), scratch))
        tally = Tally()
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
                for each in ports:
                    await wait_ready(session, f"http://127.0.0.1:{each['agent']}", pods)
                await wait_ready(session, f"http://127.0.0.1:{port}", pods)
                began = time.monotonic()
                await play(session, f"http://127.0.0.1:{port}", options, tally)
                seconds = time.monotonic() - began
                evicted = [await removed_blocks(session, f"http://127.0.0.1:{each['agent']}") for each in ports]
        finally:
            for process in reversed(pods):
                process.__exit__()
    within = sum(abs(difference) <= options.block for difference in tally.differences)
    count = max(1, len(tally.differences))
    return {
        "requests": len(tally.differences),
        "failed": tally.failed,
        "unpredicted": tally.unpredicted,
        "within_one_block": within / count,
        "exact": sum(not difference for difference in tally.differences) / count,
        "over": sum(difference > options.block for difference in tally.differences),
        "under": sum(difference < -options.block for difference in tally.differences),
        "returned_to_pod": tally.returned / max(1, tally.later_turns),
        "later_turns": tally.later_turns,
        "cached_share": tally.cached / max(1, tally.prompt),
        "prompt_tokens": tally.prompt,
        "kinds": dict(tally.kinds),
        "evicted_blocks": evicted,
        "seconds": seconds,
    }


async def removed_blocks(session: aiohttp.ClientSession, url: str) -> int:
    """Return how many blocks an engine has evicted."""
    async with session.get(f"{url}/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith("fairlead_evicted_pages_total "):
                return int(float(line.split()[1]))
    return 0


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--requests", type=int, default=2000, help="number of requests")
    parser.add_argument("--chats", type=int, default=12, help="conversations that take turns")
    parser.add_argument("--concurrency", type=int, default=3, help="requests at a time")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between a client's requests")
    parser.add_argument("--block", type=int, default=32, help="tokens of a KV block")
    parser.add_argument("--blocks", type=int, default=400, help="KV blocks of each engine")
    parser.add_argument("--seed", type=int, default=1, help="seed of the conversations")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where vLLM's environment and the model are kept")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="engine-agents-"))
    print(f"== logs in {scratch}", flush=True)
    results = asyncio.run(run(options, scratch))
    table = Table("figure", "value")
    for name, value in results.items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    Console().print(table)
    write_report(__name__, options, results)
    is_good = results["within_one_block"] >= MIN_WITHIN and results["returned_to_pod"] >= MIN_RETURNED and not results["failed"]
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
