"""FlashInfer's kernels for the checks, compiled in processes of their own while other stages run: `python -m bench.gpu.compile KIND`.

Only a handful: each kind of layer is a module of its own (element type, head size, window, cap), and nvcc takes a minute for one.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.gpu.report import ROOT

KINDS: dict[str, tuple[str, int, int, int | None, float | None]] = {
    "bf16-128": ("bfloat16", 8, 128, None, None),
    "bf16-64": ("bfloat16", 8, 64, None, None),
    "bf16-128-window": ("bfloat16", 8, 128, 100, None),
    "bf16-256-window-cap": ("bfloat16", 8, 256, 100, 30.0),
    "fp16-128": ("float16", 8, 128, None, None),
    "bf16-128-single": ("bfloat16", 2, 128, None, None),
    "bf16-256-cap": ("bfloat16", 8, 256, None, 30.0),
    "bf16-128-fa3": ("bfloat16", 8, 128, None, None),
}
"""Element type, query heads on two KV heads, head size, window, cap; the ones that most depends on first. Those with 8 heads share one
module between prefill and decode (tensor cores); "single" adds the other decode kernel, "fa3" the prefill kernels for Hopper alone."""


@dataclass
class Builds:
    """The running compilers."""

    processes: dict[str, subprocess.Popen[str]]
    began: float

    def wait(self, seconds: float) -> Iterator[dict[str, object]]:
        """A row for each kind as it is there; those that are not within `seconds` are ended."""
        deadline = time.monotonic() + seconds
        waiting = dict(self.processes)
        while waiting and time.monotonic() < deadline:
            for kind, process in list(waiting.items()):
                if process.poll() is not None:
                    del waiting[kind]
                    output = process.stdout.read() if process.stdout else ""
                    took = time.monotonic() - self.began
                    row: dict[str, object] = {"what": kind, "ok": process.returncode == 0, "seconds": round(took, 1)}
                    yield row if row["ok"] else row | {"said": output[-1500:]}
            time.sleep(0.1)
        for kind, process in waiting.items():
            process.kill()
            yield {"what": kind, "said": f"not compiled within {time.monotonic() - self.began:.0f} s"}

    @property
    def built(self) -> set[str]:
        return {kind for kind, process in self.processes.items() if process.returncode == 0}


def start(kinds: list[str]) -> Builds:
    """Compile all of `kinds` beside each other."""
    jobs = str(max(2, (os.cpu_count() or 4) // max(1, len(kinds)) + 1))
    environment = os.environ | {"MAX_JOBS": jobs}
    command = [sys.executable, "-m", "bench.gpu.compile"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    made = {kind: subprocess.Popen([*command, kind], cwd=ROOT, env=environment, **pipes) for kind in kinds}  # type: ignore[call-overload]
    return Builds(made, time.monotonic())


def main(kind: str) -> int:
    """Build and run the kernels of one kind, as the worker does at its start."""
    import torch

    from fairlead_worker.kernels.base import KVSpec
    from fairlead_worker.kernels.flashinfer import FlashInferBackend

    spec = KVSpec((layer(kind),), 16, getattr(torch, KINDS[kind][0]), torch.device("cuda"))
    backend = FlashInferBackend(spec, 4, prefill_kernels=kernels(kind))
    backend.prepare()
    return 0 if backend.kinds else 1


def kernels(kind: str) -> str:
    """Which prefill kernels one of KINDS is for."""
    return "fa3" if kind.endswith("fa3") else "fa2"


def layer(kind: str):  # type: ignore[no-untyped-def]  # the type's module imports torch
    """One of KINDS as the worker names it."""
    from fairlead_worker.kernels.base import LayerSpec

    _, heads, dim, window, softcap = KINDS[kind]
    return LayerSpec(heads, 2, dim, dim, dim**-0.5, window, softcap)


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO)
    sys.exit(main(sys.argv[1]))
