"""`RadixTree` of ai-dynamo-runtime on the conversation trace.

This program runs in that package's own environment. Its arguments are the trace and the number of workers; it prints JSON.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

from dynamo._core import RadixTree


def replay() -> None:
    trace, workers = Path(sys.argv[1]), int(sys.argv[2])
    tree, storing, blocks, hits = RadixTree(), 0.0, 0, 0
    known: dict[int, int] = {}
    times: list[float] = []
    for n, line in enumerate(trace.read_text().splitlines()):
        chain = [known.setdefault(block, spread(block)) for block in json.loads(line)["hash_ids"]]
        data = {"parent_hash": None, "blocks": [{"block_hash": each, "tokens_hash": each} for each in chain]}
        event = json.dumps({"event_id": n, "data": {"stored": data}, "dp_rank": 0}).encode()  # made before the clock runs
        began = time.perf_counter_ns()
        found = tree.find_matches(chain)
        between = time.perf_counter_ns()
        tree.apply_event(n % workers, event)
        storing += (time.perf_counter_ns() - between) / 1e9
        times.append((between - began) / 1e3)
        blocks += len(chain)
        hits += sum(found.scores.values())
    times.sort()
    p50, p99 = times[len(times) // 2], times[int(0.99 * len(times))]
    print(json.dumps({"p50_us": p50, "p99_us": p99, "stored_per_s": blocks / storing, "hits": hits}))


def spread(block: int) -> int:
    return int.from_bytes(hashlib.blake2b(block.to_bytes(8, "little"), digest_size=8).digest(), "little")


replay()
