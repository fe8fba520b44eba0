"""A served model that several stages share: loading 16 GB for each of them would cost more than what they measure."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.device import Device
from bench.gpu.model import saved
from fairlead_worker.execution.cuda_graphs.decodes import GraphedDecodes, graphs_for
from fairlead_worker.execution.cuda_graphs.recorder import Cut
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.kernels.base import KVSpec
from fairlead_worker.lora.slots import AdapterSlots
from fairlead_worker.model.loader import load_model

PAGE = 16
SHARED = 34_200, 256
"""Pages, and rows of the largest graph, of the 8B shape in the stages that share it: 256 decodes at a context of 2k, 67 GiB."""
SHARED_BYTES = 100 << 30
"""Memory of a device that holds it."""
SMALLER = 12_000, 64
"""The same for other devices: 64 decodes, 24 GiB."""


class Eager:
    """In the place of graphs where there is no GPU: the same calls on the same memory."""

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        output = run().clone()
        return lambda: output.copy_(run())

    def record_pieces(self, run: Callable[[Cut], Any]) -> Callable[[], Any]:
        return lambda: run(lambda between: between())


class Kit:
    """Models by shape on FlashInfer, their KV filled with random numbers, and their graphs recorded. One is kept, until `drop`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.capture_seconds = 0.0
        self._held: tuple[str, int, ModelRunner] | None = None

    def shared(self, pages: int, rows: int) -> ModelRunner:
        """The 8B shape, of the size that does for all; where all is tiny, a tiny one of `pages` and `rows`."""
        if self.device.tiny:
            return self.runner("tiny", pages, rows)
        size = SHARED if self.large else SMALLER
        assert pages <= size[0] and rows <= size[1], "the shared model must be large enough for every stage"
        return self.runner("8b", *size)

    @property
    def large(self) -> bool:
        """Whether the device holds `SHARED`. Stages leave out what needs it elsewhere."""
        return self.device.tiny or torch.cuda.get_device_properties(self.device.device).total_memory >= SHARED_BYTES

    def runner(self, shape: str, pages: int, rows: int) -> ModelRunner:
        """`pages` of KV at least, graphs of up to `rows` decodes; none where they cannot be recorded."""
        if self._held is not None and self._held[:2] == (shape, rows) and self._held[2].backend.pages >= pages:
            return self._held[2]
        self.drop()
        runner = make(self.device, shape, pages)
        began = time.perf_counter()
        runner.graphs = recorded(self.device, runner, rows)
        self.capture_seconds = time.perf_counter() - began
        self._held = shape, rows, runner
        return runner

    def drop(self) -> None:
        """What it holds of the device is free, and its memory is the next one's."""
        self._held = None
        release()


def make(device: Device, shape: str, pages: int) -> ModelRunner:
    """The model of `shape` on FlashInfer, without graphs. Its pages hold random numbers, as attention over zeros would be no work to do."""
    with saved(device, shape) as folder:
        loaded = load_model(str(folder), dtype="bfloat16", device=device.device)
    backend = device.flashinfer(KVSpec(loaded.layers, PAGE, loaded.dtype, loaded.device), pages)
    for part in (*backend.keys, *backend.values):
        part.normal_()
    backend.prepare()
    return ModelRunner(loaded, backend)


def recorded(device: Device, runner: ModelRunner, rows: int, slots: AdapterSlots | None = None) -> GraphedDecodes | None:
    """Graphs of up to `rows` decodes; None, with the reason in the log, where they cannot be recorded: what is measured is without them."""
    recorder: Any = None if device.cuda else Eager()
    graphs = graphs_for(runner.forward, runner.backend, rows, runner.loaded.max_model_len, recorder, slots)
    if graphs is None:
        return None
    graphs.capture()
    device.wait()
    # As the engine does at its start: a collection that traverses all objects of torch and transformers takes 0.2 s.
    gc.collect()
    gc.freeze()
    return graphs if graphs.is_recorded else None


def release() -> None:
    """Free unreferenced device memory."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
