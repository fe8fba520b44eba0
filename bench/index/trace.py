"""The mirror's table beside `ai-dynamo-runtime`'s RadixTree on the Mooncake conversation trace: the same lookups, by turns.

Each request of the trace is looked up and then stored on one of 64 workers, chosen in turn; both must find the same. The peer runs in an
environment of its own (`radix_peer.py`; made from `pins.txt`, cached).
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from array import array
from pathlib import Path

from bench.index.redis_server import Numbers, percentile
from fairlead_index.mirror.prefix_table import PrefixTable

WORKERS = 64
HERE = Path(__file__).parent
PINS = HERE / "pins.txt"
PYTHON = "3.11"


class Missing(Exception):
    """The comparison cannot run on this machine. The message says what is missing and what to do."""


def find_trace(given: Path | None) -> Path:
    """Return the path of the trace. Raises Missing."""
    if given is not None and given.is_file():
        return given
    raise Missing(
        "the Mooncake conversation trace: download FAST25-release/traces/conversation_trace.jsonl of github.com/kvcache-ai/Mooncake "
        "and give it with --trace (or TRACE=... make bench-index)"
    )


def peer_python(cache: Path) -> Path:
    """Return the peer's environment, from the cache or newly created. Raises Missing."""
    folder = cache / f"dynamo-{hashlib.sha256(PINS.read_bytes()).hexdigest()[:10]}"
    python, done = folder / "bin" / "python", folder / ".complete"
    if done.exists():
        return python
    print(f"== making the environment of ai-dynamo-runtime in {folder} (75 MB)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    uv = Path(sys.executable).with_name("uv")
    for command in ([uv, "venv", "--python", PYTHON, folder], [uv, "pip", "install", "--python", python, "-r", PINS]):
        ended = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        if ended.returncode:
            raise Missing(f"ai-dynamo-runtime's wheel: {ended.stderr.strip().splitlines()[-1:]}")
    done.touch()
    return python


def requests(trace: Path) -> list["array[int]"]:
    """Return the block hashes of each request. The trace's ids are chained already; hashing spreads them over 64 bits."""
    known: dict[int, int] = {}
    found = []
    for line in trace.read_text().splitlines():
        ids = json.loads(line)["hash_ids"]
        hashes = array("Q")
        for block in ids:
            if block not in known:
                known[block] = int.from_bytes(hashlib.blake2b(block.to_bytes(8, "little"), digest_size=8).digest(), "little")
            hashes.append(known[block])
        found.append(hashes)
    return found


def ours(chains: list["array[int]"]) -> Numbers:
    """Return the microseconds of a lookup and the blocks stored per second."""
    table, times, storing, blocks, hits = PrefixTable(), [], 0.0, 0, 0
    slots = [n.to_bytes(2, "big") for n in range(WORKERS)]
    for n, slot in enumerate(slots):
        table.join(slot, f"worker-{n}", 1)
    for n, chain in enumerate(chains):
        began = time.perf_counter_ns()
        found = table.match(chain)
        between = time.perf_counter_ns()
        table.store(slots[n % WORKERS], chain)
        storing += (time.perf_counter_ns() - between) / 1e9
        times.append((between - began) / 1e3)
        blocks += len(chain)
        hits += sum(found.values())
    return {"p50_us": percentile(times, 0.5), "p99_us": percentile(times, 0.99), "stored_per_s": blocks / storing, "hits": hits}


def peer(python: Path, trace: Path) -> Numbers:
    ended = subprocess.run(
        [str(python), str(HERE / "radix_tree.py"), str(trace), str(WORKERS)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )
    if ended.returncode:
        raise Missing(f"an answer of ai-dynamo-runtime: {ended.stderr.strip().splitlines()[-1:]}")
    answer: Numbers = json.loads(ended.stdout.splitlines()[-1])
    return answer


def compare(given: Path | None, cache: Path, repeats: int) -> dict[str, list[Numbers]]:
    """Run both sides in turns. Raises Missing."""
    trace = find_trace(given)
    python = peer_python(cache)
    chains = requests(trace)
    sides: dict[str, list[Numbers]] = {"mirror": [], "RadixTree": []}
    for _ in range(repeats):
        sides["RadixTree"].append(peer(python, trace))
        sides["mirror"].append(ours(chains))
        if sides["mirror"][-1]["hits"] != sides["RadixTree"][-1]["hits"]:
            raise AssertionError(f"the two disagree: {sides}")
    return sides
