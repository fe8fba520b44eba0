"""Stage: how much of the time a kernel runs while streams are served: as one ends, the next begins, with its prompt."""

import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.device import Device
from bench.gpu.loop import Loop
from bench.gpu.model import SHAPES
from bench.gpu.report import beside
from bench.gpu.roofline import beside_roofline, decode_work, rates_of
from bench.gpu.shared_model import Kit
from fairlead_worker.execution.cuda_graphs.piecewise import PieceSizes, record_pieces


def measure(device: Device, kit: Kit) -> Iterator[dict[str, Any]]:
    """A row with steps ahead and graphs, which is what the bar is for, then one of the plain loop: the share of a window in which any
    kernel ran, by the profiler's events, and tokens a second without a profiler."""
    streams, prompt, new, warm, steps = (64, 512, 256, 300, 200) if not device.tiny else (3, 20, 6, 4, 5)
    shape = "tiny" if device.tiny else "8b"
    runner = kit.shared(2 * streams * -(-(prompt + new) // 16) + 64, streams)
    graphs, rates = runner.graphs, rates_of(device)
    sizes = PieceSizes(1024 if not device.tiny else 64)
    pieces = record_pieces(graphs, runner.forward, runner.backend, runner.loaded.max_model_len, sizes)
    try:
        for what, overlap in (("steps ahead, graphs", True), ("the plain loop", False)):
            runner.graphs, runner.pieces = (graphs, pieces) if overlap else (None, None)
            loop = Loop(runner, overlap, chunked_prefill_size=512, max_num_seqs=streams)
            serving = Serving(loop, streams, prompt, new, SHAPES[shape]["vocab_size"])
            serving.steps(warm)
            rate = serving.rate(device, steps)
            row = {
                "what": f"{streams} streams, {what}",
                "tokens_per_s": rate,
                "busy": busy(device, serving, steps),
                "graphs": runner.graphs is not None,
                "pieces": 0 if runner.pieces is None else max(runner.pieces.sizes, default=0),
            }
            row = beside_roofline(row, rates, decode_work(shape, streams, prompt + new / 2), streams / rate)
            yield beside(row, "busy", least=0.97) if overlap else row
    finally:
        runner.graphs, runner.pieces = graphs, None


class Serving:
    """As many streams as there are to be, at every step; their ends are spread, for the first ones have answers of all lengths."""

    def __init__(self, loop: Loop, streams: int, prompt: int, new: int, vocabulary: int) -> None:
        self._loop, self._streams, self._prompt, self._new, self._vocabulary = loop, streams, prompt, new, vocabulary
        self._begun = 0
        self._draw = random.Random(5)

    def steps(self, count: int) -> None:
        """So many steps, and none out."""
        for _ in range(count):
            while len(self._loop.live) < self._streams:
                new = self._new if self._begun >= self._streams else 1 + self._new * (self._begun + 1) // self._streams
                self._loop.submit(self._begun, [self._draw.randrange(10, self._vocabulary) for _ in range(self._prompt)], new)
                self._begun += 1
            self._loop.step()
        self._loop.settle()

    def rate(self, device: Device, count: int) -> float:
        """Tokens a second over so many steps."""
        device.wait()
        before, began = self.tokens, time.perf_counter()
        self.steps(count)
        return (self.tokens - before) / (time.perf_counter() - began)

    @property
    def tokens(self) -> int:
        """Read so far."""
        return sum(map(len, self._loop.tokens.values()))


def busy(device: Device, serving: Serving, steps: int) -> float:
    """The share of `steps` steps, between their first kernel and their last, in which a kernel ran. On a CPU: any operation of torch's.
    RuntimeError where the profiler has seen none."""
    kind = ProfilerActivity.CUDA if device.cuda else ProfilerActivity.CPU
    device.wait()
    with profile(activities=[kind]) as seen:
        serving.steps(steps)
        device.wait()
    host = torch.autograd.DeviceType.CPU  # type: ignore[attr-defined]  # torch does not list it
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in seen.events()
        if (event.device_type != host) == device.cuda and not getattr(event, "is_user_annotation", False)
    ]
    if not spans:
        raise RuntimeError("the profiler has seen no kernels: is CUPTI to be had here?")
    return float(covered(spans) / (max(end for _, end in spans) - min(begin for begin, _ in spans)))


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the time that lies in any of the spans, (begin, end) each."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
