"""FlashInfer's kernels for the checks, compiled in processes of their own while other stages run: `python -m bench.gpu.compile KIND`.

Only a handful: each kind of attention is a module of its own (element type, head size, window, cap), and nvcc takes a minute for one. The
kernels of fused layers are three more, which a worker would otherwise compile one after the other while it loads its model.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common.report import ROOT

if TYPE_CHECKING:
    import torch

    from fairlead_worker.model.fused.library import Library

KINDS: dict[str, tuple[str, int, int, int | None, float | None]] = {
    "bf16-128": ("bfloat16", 8, 128, None, None),
    "bf16-64": ("bfloat16", 8, 64, None, None),
    "bf16-128-window": ("bfloat16", 8, 128, 100, None),
    "bf16-256-window-cap": ("bfloat16", 8, 256, 100, 30.0),
    "fp16-128": ("float16", 8, 128, None, None),
    "bf16-128-single": ("bfloat16", 2, 128, None, None),
    "bf16-256-cap": ("bfloat16", 8, 256, None, 30.0),
    "bf16-128-fa3": ("bfloat16", 8, 128, None, None),
    "bf16-128-float8": ("bfloat16", 8, 128, None, None),
}
"""Element type, query heads on two KV heads, head size, window, cap; the ones that most depends on first. Those with 8 heads share one
module between prefill and decode (tensor cores); "single" adds the other decode kernel, "fa3" the prefill kernels for Hopper alone.
"float8": KV in 8 bits."""

FUSED = ("norm", "rope", "activation")
NEEDED = (*list(KINDS)[:4], "bf16-128-single", *FUSED)
"""Are waited for; the others, which compile at a lower priority, are used where they are there in time."""
JOBS = 4
"""Compilers at once for each kind: the needed ones keep 16 cores busy, and all together take 64 GiB at most."""


@dataclass
class Builds:
    """The running compilers."""

    processes: dict[str, subprocess.Popen[str]]
    began: float
    built: set[str] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)

    def wait(self, seconds: float) -> Iterator[dict[str, object]]:
        """A row for each kind as it is there, until the needed ones are or `seconds` are over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._told.issuperset(name for name in self.processes if name in NEEDED):
            yield from self.finished()
            time.sleep(0.1)
        yield from self.finished()

    def finished(self) -> Iterator[dict[str, object]]:
        """A row for each that ended since the last time."""
        for kind, process in self.processes.items():
            if kind not in self._told and process.poll() is not None:
                self._told.add(kind)
                row: dict[str, object] = {"what": kind, "ok": process.returncode == 0, "seconds": round(time.monotonic() - self.began, 1)}
                if process.returncode == 0:
                    self.built.add(kind)
                    yield row
                else:
                    yield row | {"said": (process.stdout.read() if process.stdout else "")[-1500:]}

    def stop(self) -> Iterator[dict[str, object]]:
        """A row for each that ended since the last time, or is given up now."""
        yield from self.finished()
        for kind in self.kill():
            self._told.add(kind)
            yield {"what": kind, "said": f"given up after {time.monotonic() - self.began:.0f} s"}

    def kill(self) -> list[str]:
        """End what still runs, with all its compilers; which kinds those were."""
        running = [kind for kind, process in self.processes.items() if process.poll() is None]
        for kind in running:
            os.killpg(self.processes[kind].pid, signal.SIGKILL)
            self.processes[kind].wait()
        return running


def tools() -> dict[str, object]:
    """A row: what FlashInfer compiles with, and where it was found. nvcc may also be where CUDA_HOME says, or in /usr/local/cuda."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ] or [Path("/usr/local/cuda")]
    beside = next((str(home / "bin" / "nvcc") for home in homes if (home / "bin" / "nvcc").is_file()), None)
    found = {name: shutil.which(name) for name in ("nvcc", "ninja", "c++")}
    found["nvcc"] = found["nvcc"] or beside
    return {"what": "tools to compile with", "ok": all(found.values()), **found}


def start(kinds: list[str]) -> Builds:
    """Compile all of `kinds` beside each other."""
    environment = os.environ | {"MAX_JOBS": str(JOBS)}
    made: dict[str, subprocess.Popen[str]] = {}
    for kind in sorted(kinds, key=lambda kind: kind not in NEEDED):
        command = ["nice", "-n", "0" if kind in NEEDED else "10", sys.executable, "-m", "bench.gpu.compile", kind]
        made[kind] = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
    return Builds(made, time.monotonic())


def build_kernels(kind: str) -> int:
    """Build and run the kernels of one kind, as the worker does at its start."""
    import torch

    if kind in FUSED:
        run_layer(kind, torch.device("cuda"))
        return 0
    from fairlead_worker.kernels.base import KVSpec
    from fairlead_worker.kernels.flashinfer import FlashInferBackend

    spec = KVSpec((layer(kind),), 16, getattr(torch, KINDS[kind][0]), torch.device("cuda"), scales(kind))
    backend = FlashInferBackend(spec, 4, prefill_kernels=kernels(kind))
    backend.prepare()
    return 0 if backend.kinds else 1


def run_layer(kind: str, device: "torch.device", flashinfer: "Library | None" = None) -> None:
    """Builds one of FUSED and runs it on a few tokens. `flashinfer`: None: FlashInfer's. ValueError where it is not there."""
    import torch

    from fairlead_worker.kernels.flashinfer_library import library

    kernels: Any = flashinfer or library()
    if kernels is None:
        raise ValueError("FlashInfer does not import here")
    rows = torch.ones(2, 128, dtype=torch.bfloat16, device=device)
    match kind:
        case "norm":
            kernels.rmsnorm(rows, rows[0], 1e-6)
        case "rope":
            table = torch.ones(2, 64, device=device)
            kernels.apply_rope_with_cos_sin_cache_inplace(torch.arange(2, device=device), rows, rows.clone(), 64, table)
        case _:
            kernels.silu_and_mul(rows)


def kernels(kind: str) -> str:
    """Which prefill kernels one of KINDS is for."""
    return "fa3" if kind.endswith("fa3") else "fa2"


def scales(kind: str) -> tuple[float, ...] | None:
    """The scale of one of KINDS with KV in float8; None for the others."""
    return (0.5,) if kind.endswith("float8") else None


def layer(kind: str):  # type: ignore[no-untyped-def]  # the type's module imports torch
    """One of KINDS as the worker names it."""
    from fairlead_worker.kernels.base import LayerSpec

    _, heads, dim, window, softcap = KINDS[kind]
    return LayerSpec(heads, 2, dim, dim, dim**-0.5, window, softcap)


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO)
    sys.exit(build_kernels(sys.argv[1]))
