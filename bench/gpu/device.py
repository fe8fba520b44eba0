"""What the stages run on, and how large they are: a GPU, or a CPU with everything tiny, where FlashInfer is interpreted."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu import interpreter
from fairlead_worker.kernels.base import KVSpec
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.kernels.flashinfer_library import library


@dataclass(frozen=True)
class Device:
    """`tiny`: sizes for a dry run."""

    device: torch.device
    tiny: bool
    ends: float
    """Monotonic time by which all is over."""
    folder: Path | None = None
    """Where the models of this run are; None: each stage makes its own."""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def left(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()

    def flashinfer(self, spec: KVSpec, pages: int, prefill_kernels: str = "fa2") -> FlashInferBackend:
        """The backend on the real library on a GPU, on the interpreter elsewhere."""
        return FlashInferBackend(spec, pages, None if self.cuda else interpreter, prefill_kernels)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], Any], repeats: int = 20) -> float:
        """Median time of `run` on the device, after two runs that warm up; each ended by waiting, as a step is."""
        times = []
        for turn in range(2 + (2 if self.tiny else repeats)):
            self.wait()
            begin = time.perf_counter()
            run()
            self.wait()
            if turn >= 2:
                times.append(time.perf_counter() - begin)
        return median(times)

    def kernel_seconds(self, runs: Sequence[Callable[[], Any]], repeats: int = 20) -> float:
        """Median time of one of `runs` on the device. They follow each other in a CUDA graph, so the host's launches do not count: those
        take longer than a small kernel. Runs over different weights keep the device's cache from holding them.
        """
        if not self.cuda:
            return self.seconds(runs[0], repeats)
        for run in runs:  # what is compiled or allocated at a first call
            run()
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for run in runs:
                run()
        return self.seconds(graph.replay, repeats) / len(runs)

    def facts(self) -> dict[str, Any]:
        """For the report."""
        import transformers

        known: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, "tiny": self.tiny}
        if not self.cuda:
            return known | {"device": "cpu", "flashinfer": "interpreted"}
        made = torch.cuda.get_device_properties(self.device)
        known |= {"device": made.name, "memory_gib": round(made.total_memory / 2**30, 1), "multiprocessors": made.multi_processor_count}
        return known | {"cuda": torch.version.cuda, "flashinfer": getattr(library(), "__version__", "not installed")}


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) / 2
