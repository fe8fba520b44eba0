"""Time of one attention layer on CPU: `native` (compiled, pages in place) beside `cpu` (torch).

12 query heads on 4 KV heads of 64, pages of 16 tokens at random places, --threads threads. Figures are medians of CPU time, or of wall
time with more than one thread. The KV of several layers alternates, so that a decode step finds its KV in memory and not in the CPU
cache, as in a whole model. Ratios are of the medians.
"""

import random
import time
from itertools import accumulate
from statistics import median

import torch

from bench.common.report import make_parser, write_report
from fairlead_worker.kernels.base import Backend, KVSpec, LayerSpec, PackedStep, StepContext
from fairlead_worker.kernels.cpu import CpuBackend
from fairlead_worker.kernels.native import NativeBackend

PAGE = 16
CACHE = 64 << 20
"""Lower limit of the KV of all layers, in bytes: more than a core's last-level cache."""
SHAPES = {
    "decode 8 x 320": [(319, 1)] * 8,
    "decode 8 x 4096": [(4095, 1)] * 8,
    "decode 64 x 1024": [(1023, 1)] * 64,
    "verify 8 x 5 on 1024": [(1019, 5)] * 8,
    "chunk 256 on 0": [(0, 256)],
    "chunk 256 on 1024": [(1024, 256)],
    "chunk 256 on 4096": [(4096, 256)],
    "mixed 8 x 320 + chunk 240": [(319, 1)] * 8 + [(0, 240)],
}


def packed(rows: list[tuple[int, int]]) -> PackedStep:
    """Return the step. Its rows have shuffled pages."""
    needed = [-(-(start + count) // PAGE) for start, count in rows]
    free = random.Random(1).sample(range(sum(needed)), sum(needed))
    indices = torch.tensor(free, dtype=torch.int32)
    tables = indices.split(needed)  # type: ignore[no-untyped-call]
    positions = [torch.arange(start, start + count) for start, count in rows]
    slots = [table[p // PAGE] * PAGE + p % PAGE for table, p in zip(tables, positions, strict=True)]
    tokens = sum(count for _, count in rows)
    starts, counts = zip(*rows, strict=True)
    indptr = torch.tensor([0, *accumulate(needed)], dtype=torch.int32)
    none = torch.empty(0, dtype=torch.int64)
    return PackedStep(none.new_zeros(tokens), torch.cat(positions), torch.cat(slots).long(), starts, counts, indptr, indices, none)


def measure(layer: LayerSpec, dtype: torch.dtype, rows: list[tuple[int, int]], seconds: float) -> dict[str, float]:
    """Return the median milliseconds of a layer for each backend."""
    step = packed(rows)
    pages = len(step.page_indices)
    one = KVSpec((layer,), PAGE, dtype, torch.device("cpu"))
    layers = max(2, -(-CACHE // (one.page_bytes * pages)))
    spec = KVSpec((layer,) * layers, PAGE, dtype, torch.device("cpu"))
    tokens = sum(step.counts)
    stacked = torch.randn(tokens, layer.heads * layer.key_dim + layer.kv_heads * (layer.key_dim + layer.value_dim)).to(dtype)
    parts = stacked.split([n * layer.key_dim for n in (layer.heads, layer.kv_heads, layer.kv_heads)], dim=1)  # type: ignore[no-untyped-call]
    query, key, value = (part.unflatten(1, (-1, layer.key_dim)) for part in parts)
    backends: list[Backend] = [NativeBackend(spec, pages), CpuBackend(spec, pages)]
    contexts: list[StepContext] = []
    for backend in backends:
        for storage in (*backend.keys, *backend.values):  # type: ignore[attr-defined]  # not of the protocol
            storage.normal_()
        contexts.append(backend.plan(step))
    times: list[list[float]] = [[], []]
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    until = time.perf_counter() + seconds
    turn = 0
    while time.perf_counter() < until or turn < 6:
        for side, context in zip(times, contexts, strict=True):
            began = clock()
            context.attend(turn % layers, query, key, value)
            side.append(clock() - began)
        turn += 1
    return {backend.name: median(side[2:]) * 1e3 for backend, side in zip(backends, times, strict=True)}


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--heads", type=int, nargs=3, default=[12, 4, 64], metavar=("HEADS", "KV_HEADS", "SIZE"))
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    heads, kv_heads, size = options.heads
    layer = LayerSpec(heads, kv_heads, size, size, size**-0.5)
    results: dict[str, float] = {}
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            for name, rows in SHAPES.items():
                found = measure(layer, dtype, rows, options.seconds)
                kind = str(dtype).removeprefix("torch.")
                ratio = found["cpu"] / found["native"]
                results |= {f"{kind} {name}, {side}, ms": value for side, value in found.items()} | {f"{kind} {name}, ratio": ratio}
                print(f"{kind:9} {name:26} native {found['native']:8.3f} ms  cpu {found['cpu']:8.3f} ms  ratio {ratio:5.2f}", flush=True)
    write_report(__name__, options, results)
