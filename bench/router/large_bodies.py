"""Memory and delay while a router reads large bodies: in its own threads, or in the processes of its pool.

Bodies of Chinese text (three tokens a character) or of empty lists arrive at once, each of another tenant, and a prompt of 2 KB every 50 ms
beside them. `in threads` calls the same reader without the pool. Memory is that of all processes of a side.
"""

import argparse
import asyncio
import multiprocessing
import random
import resource
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from bench.common.report import make_parser, write_report
from bench.router.tokenization import make_format
from fairlead_common.json_size import MAX_OBJECTS, check_json
from fairlead_common.memory import LARGE
from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_common.prompts.token_cache import TokenCache
from fairlead_common.protocols.paths import COMPLETIONS
from fairlead_index.hashing import prompt_root
from fairlead_router.fleet.prompt_formats import KnownFormat
from fairlead_router.request.prompts import Prompt, Prompts

SIDES = ("in threads", "in processes")
SHORT = "a short prompt " * 140
SHORT_INTERVAL = 0.05
MIB = 1 << 20
TOKENS = 1 << 24
"""Context length: no body is refused."""


def make_prompts(threads: ThreadPoolExecutor) -> Prompts:
    """Return the router's parser with one known prompt format."""
    encoder_cache = TokenCache(64 * MIB)
    encoder = PromptEncoder(msgspec.structs.replace(make_format(), max_model_len=TOKENS), encoder_cache)
    known = KnownFormat("bench", encoder, prompt_root(encoder.format))
    formats: Any = SimpleNamespace(
        current=known,
        cache=encoder_cache,
        of_model=lambda name, canary: known,
        has_model=lambda name: True,
        is_name_partial=lambda name: False,
        longest_prompt=lambda: TOKENS,
        with_same_tokens=lambda known: [],
    )
    return Prompts(formats, threads, tokenize=True)


def body_of(text: str) -> bytes:
    return msgspec.json.encode({"model": "bench", "prompt": text})


def large_body(kind: str, megabytes: float, seed: int) -> bytes:
    if kind == "lists":
        return msgspec.json.encode({"model": "bench", "prompt": f"a prompt {seed}", "messages": [[]] * (MAX_OBJECTS - 100)})
    chance = random.Random(seed)
    return body_of("".join(chr(chance.randrange(0x4E00, 0x9FA5)) for _ in range(int(megabytes * 1e6 / 3))))


async def read_all(side: str, bodies: list[bytes], thread_count: int) -> dict[str, float]:
    """Read all bodies at once on one side. Return the seconds until all are read, and the delays of short prompts in ms."""
    threads = ThreadPoolExecutor(thread_count)
    delays: list[float] = []
    prompts = make_prompts(threads)
    loop = asyncio.get_running_loop()

    async def read(body: bytes, tenant: str) -> Prompt:
        if side == SIDES[1]:
            return await prompts.read(COMPLETIONS, body, tenant=tenant)
        return await loop.run_in_executor(threads, prompts._read, COMPLETIONS, body, lambda salt: salt, "", check_json(body, TOKENS))

    peak = 0.0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, resident_mib())
            await asyncio.sleep(0.02)

    async def read_short() -> None:
        while True:
            began = time.perf_counter()
            await prompts.read(COMPLETIONS, body_of(f"{len(delays)} {SHORT}"))  # a new text, so that the token cache does not answer
            delays.append(1000 * (time.perf_counter() - began))
            await asyncio.sleep(SHORT_INTERVAL)

    for _ in range(2):  # both processes start
        await asyncio.gather(*(read(body_of(f"{tenant} {'long ' * LARGE}"), str(tenant)) for tenant in range(2)))
    watching = asyncio.create_task(watch())
    before, began, short = resident_mib(), time.perf_counter(), asyncio.create_task(read_short())
    found = await asyncio.gather(*(read(body, str(number)) for number, body in enumerate(bodies)))
    seconds = time.perf_counter() - began
    short.cancel()
    watching.cancel()
    assert all(prompt.length for prompt in found)
    after = resident_mib()
    prompts.close()
    threads.shutdown()
    return {
        "before MiB": before,
        "peak MiB": peak,
        "after MiB": after,
        "all done after s": seconds,
        "short prompt waits ms": max(delays),
    }


def resident_mib() -> float:
    """Return the resident memory of this process and its children."""
    children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in ("self", *children))
    return pages * resource.getpagesize() / MIB


def measure(side: str, options: argparse.Namespace, seed: int) -> dict[str, float]:
    bodies = [large_body(options.kind, options.megabytes, seed * options.bodies + number) for number in range(options.bodies)]
    return asyncio.run(read_all(side, bodies, options.threads))


def main() -> None:
    """Print a table, and write JSON where asked."""
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--kind", choices=("text", "lists"), default="text")
    parser.add_argument("--bodies", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=1.5, help="size of a body")
    parser.add_argument("--threads", type=int, default=4, help="threads that read prompts; a router has two to four")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for seed in range(options.repeats):
        for side in SIDES:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                rows[side].append(process.submit(measure, side, options, seed).result())
    names = list(rows[SIDES[0]][0])
    print(f"{'':16}" + "".join(f"{name:>24}" for name in names))
    for side, measured in rows.items():
        cells = [", ".join(f"{row[name]:.3g}" if row[name] < 10 else f"{row[name]:.0f}" for row in measured) for name in names]
        print(f"{side:16}" + "".join(f"{cell:>24}" for cell in cells))
    write_report(__name__, options, rows)
