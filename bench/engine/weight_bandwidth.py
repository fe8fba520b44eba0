"""CPU decode against the machine's memory bandwidth: each step reads every weight once.

Decode: 1, 4 and 8 rows after 256 tokens of a Qwen3 shape with random weights, through the runner that serves. The rate is the bytes of the
weights divided by the step's time; KV reads are not counted. The machine's own rate is measured in alternation, over memory four times the
weights of the smaller shape, in huge pages. Linear layers alone: those of one step of the 90M shape, in the native layout and in oneDNN's.
"""

import ctypes
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from bench.common.report import make_parser, write_report
from bench.engine.step_time import PAGE, PAGES, SHAPES, plans, save
from fairlead_worker.execution.runner import make_runner
from fairlead_worker.model.loader import load_model
from fairlead_worker.model.packed import PackedLinear, can_pack
from fairlead_worker.native.linear import NativeLinear, library, packed_bytes
from fairlead_worker.native.memory import Arena, room
from fairlead_worker.platform.isa import at_least

TARGETS = {"90M": 0.55, "500M": 0.70}
"""Lower limits of the share of the machine's read bandwidth, in bfloat16."""
STEP_ROWS = (1, 4, 8)
"""A CPU without products of bfloat16 computes 8 rows more slowly than it reads the weights: there 8 rows have no target."""
PROBE = 768 << 20
Times = dict[str, list[float]]


def take_turns(sides: Mapping[str, Callable[[], object]], repeats: int) -> Times:
    """Return the seconds of each call. The sides run in turns, so that a busy machine slows all; the first three rounds are dropped.

    With one thread its CPU time, which a busy machine lengthens less.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: Times = {name: [] for name in sides}
    for repeat in range(repeats + 3):
        for name, call in sides.items():
            began = clock()
            call()
            if repeat >= 3:
                times[name].append(clock() - began)
    return times


class Probe:
    """Read PROBE bytes on all threads."""

    def __init__(self) -> None:
        self._memory = Arena(PROBE).take(PROBE).view(torch.int64).fill_(3)
        self._read = library().fairlead_read
        self._read.argtypes, self._read.restype = [ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64

    def __call__(self) -> None:
        if self._read(torch.get_num_threads(), self._memory.data_ptr(), PROBE) != 3 * PROBE // 8:
            raise AssertionError("the probe did not read everything")


def decode(shape: str, quantization: str, probe: Probe, repeats: int) -> Iterator[dict[str, float]]:
    """Yield the figures of a step for each number of rows in STEP_ROWS."""
    with tempfile.TemporaryDirectory() as folder:
        save(shape, folder)
        loaded = load_model(folder, dtype="bfloat16", quantization=quantization)
        runner = make_runner(loaded, page_size=PAGE, kv_pages=max(STEP_ROWS) * PAGES)
    weights = sum(part.nbytes for layer in loaded.model.modules() if isinstance(layer, NativeLinear) for part in layer.memory)
    for rows in STEP_ROWS:
        steps = plans(rows)
        runner.execute(steps["fill"])
        times = take_turns({"step": partial(runner.execute, steps["decode"]), "read": probe}, repeats)
        seconds, limit = median(times["step"]), PROBE / median(times["read"])
        yield {
            "rows": rows,
            "weights_MB": weights / 1e6,
            "step_ms": seconds * 1e3,
            "best_step_ms": min(times["step"]) * 1e3,
            "tokens_per_s": rows / seconds,
            "read_GBps": weights / seconds / 1e9,
            "limit_GBps": limit / 1e9,
            "best_limit_GBps": PROBE / min(times["read"]) / 1e9,
            "share": weights / seconds / limit,
            "best_share": weights / min(times["step"]) / (PROBE / min(times["read"])),
        }


@torch.inference_mode()
def linears(shape: str, repeats: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of all linear layers of a step, by number of rows."""
    size = SHAPES[shape]
    hidden, inner = size["hidden_size"], size["intermediate_size"]
    attended = size["num_attention_heads"] * 64
    shapes = [(attended + 512, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner)] * size["num_hidden_layers"]
    shapes.append((size["vocab_size"], hidden))
    arena = Arena(sum(room(packed_bytes(torch.Size(each), torch.bfloat16)) for each in shapes))
    sides: dict[str, list[nn.Module]] = {"native": [], "onednn": []}
    for each in shapes:
        weight = torch.randn(each).bfloat16()
        sides["native"].append(NativeLinear(weight, None, arena=arena))
        sides["onednn"].append(PackedLinear(weight, None))

    def run(layers: list[nn.Module], inputs: dict[int, torch.Tensor]) -> None:
        for layer, (_, wide) in zip(layers, shapes, strict=True):
            layer(inputs[wide])

    answer = {}
    for rows in (1, 8, 64, 256):
        inputs = {width: torch.randn(rows, width).bfloat16() for _, width in shapes}
        calls = {name: partial(run, layers, inputs) for name, layers in sides.items()}
        times = take_turns(calls, repeats)
        answer[str(rows)] = {name: median(values) * 1e3 for name, values in times.items()}
        answer[str(rows)] |= {f"best_{name}": min(values) * 1e3 for name, values in times.items()}
    return answer


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()
    probe = Probe()
    results: dict[str, object] = {}
    for shape, target in TARGETS.items():
        for quantization in ("none", "int8", "int4"):
            for found in decode(shape, quantization, probe, options.repeats):
                results[f"{shape}_{quantization}_{found['rows']}"] = found
                judged = quantization == "none" and (found["rows"] < 8 or at_least("avx512_bf16"))
                verdict = f"; target {target}: {'ok' if found['share'] >= target else 'short'}" if judged else ""
                print(
                    f"{shape} {'bf16' if quantization == 'none' else quantization}, {found['rows']} rows: "
                    f"step {found['step_ms']:.2f} ms (best {found['best_step_ms']:.2f}), {found['tokens_per_s']:.0f} tok/s, "
                    f"{found['weights_MB']:.0f} MB of weights at {found['read_GBps']:.1f} GB/s "
                    f"of {found['limit_GBps']:.1f}: {found['share']:.2f} (best {found['best_share']:.2f}){verdict}"
                )
    # Below AVX512 oneDNN packs no bfloat16.
    alone = linears("90M", options.repeats) if can_pack(torch.bfloat16) else {}
    for rows, times in alone.items():
        print(
            f"linear layers, {rows:>3} rows: {times['native']:.2f} ms, oneDNN {times['onednn']:.2f} ms, "
            f"ratio {times['onednn'] / times['native']:.2f} "
            f"(best {times['best_native']:.2f}, {times['best_onednn']:.2f})"
        )
    write_report(__name__, options, results | {"linears_90M_ms": alone})
