"""`make gpu-check`: stages one after the other, each with a bound of time, every finding written as it comes.

Without a device it says so in one line and exits 0. Exit status 1 where a check failed. With `--bundle`, what this machine lacks is taken
from there (`make gpu-bundle`).
"""

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.gpu.compile import Builds

ROOT = Path(__file__).parents[2]
SECONDS = 460.0
"""Of all stages together: under eight minutes with the start."""
BY_NAME = ("steady", "arrival", "peers", "cold", "offline", "ahead", "worth", "lora", "quantized", "fused")
"""Stages that `--only` alone runs, what bars there are for first: the eight minutes have no room for them. `--only targets`: all of these,
the kernels compiled before."""
GROUPS = {"targets": ("compilers", "compiled", *BY_NAME)}
Rows = Iterator[dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: the same stages, tiny, FlashInfer interpreted")
    parser.add_argument("--bundle", type=Path, help="folder of `make gpu-bundle`")
    parser.add_argument("--out", type=Path, help="folder for the JSON; bench/results/gpu on a GPU, else none")
    parser.add_argument("--only", default="", help=f"stages, comma-separated; empty: all but {', '.join(BY_NAME)}; targets: those")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all stages together")
    given = parser.parse_args(arguments)
    if given.bundle is not None and "GPU_CHECK_UNPACKED" not in os.environ:
        from bench.gpu.bundle import unpack

        os.environ |= {"GPU_CHECK_UNPACKED": "1", "PYTHONPATH": unpack(given.bundle)}
        os.execv(sys.executable, [sys.executable, "-m", "bench.gpu", *(sys.argv[1:] if arguments is None else arguments)])
    # FlashInfer calls ninja by its name, which may be installed beside the interpreter alone.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"

    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: no GPU found on this machine (torch.cuda.is_available() is false); nothing was checked")
        return 0
    return run(given.device, given.out, given.only, given.seconds)


def run(kind: str, out: Path | None, only: str, seconds: float) -> int:
    """`only`: as given, names of stages and of groups."""
    named = [name for name in only.split(",") if name]
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_CHECK_TMP")) as models:
        return _run(kind, out, named, time.monotonic() + seconds, Path(models))


def _run(kind: str, out: Path | None, named: list[str], ends: float, models: Path) -> int:
    import torch
    from bench.gpu.compile import Builds
    from bench.gpu.device import Device
    from bench.gpu.report import Report

    device = Device(torch.device(kind), kind == "cpu", ends, models)
    folder = out or (ROOT / "bench" / "results" / "gpu" if device.cuda else None)
    report = Report(folder, device.facts(), named)
    builds: list[Builds] = []
    wanted = {stage for name in named for stage in GROUPS.get(name, (name,))}
    known = stages(device, builds)
    if unknown := wanted - {name for name, _, _ in known} - {"compilers", "compiled"}:
        raise SystemExit(f"gpu-check: no stage is called {', '.join(sorted(unknown))}: {', '.join(name for name, _, _ in known)}")
    try:
        for name, bound, stage in known:
            if name not in wanted if wanted else name in BY_NAME:
                continue
            if device.left() < 5:
                report.end(name, "skipped: no time was left")
                continue
            if name in BY_NAME:  # these have the machine to themselves
                for build in builds:
                    build.kill()
            carry_out(report, name, min(bound, device.left()), stage)
    except KeyboardInterrupt:  # somebody's limit: what was found is told all the same
        report.end(name, "failed: interrupted")
    finally:
        for build in builds:
            build.kill()
    print(report.summary(), flush=True)
    if report.path is not None:
        print(f"written: {report.path}", flush=True)
    return 1 if report.failed else 0


def stages(device: Any, builds: "list[Builds]") -> list[tuple[str, float, Callable[[], Rows]]]:
    """Name, seconds at most, and what gives the rows. Kernels are compiled beside the first stages, which need none of them; `builds`:
    where the running compilers are kept, for whoever ends them."""
    from bench.gpu import (
        ahead,
        arrival,
        attention,
        cold,
        compile,
        engine,
        fused,
        lora,
        memory,
        offline,
        peers,
        quantized,
        sampling,
        serving,
        speed,
        steady,
        worth,
    )
    from bench.gpu.kit import Kit

    kinds, kit = set(compile.KINDS), Kit(device)

    def start_compilers() -> Rows:
        yield compile.tools()
        flashinfer = importlib.util.find_spec("flashinfer")
        yield {"what": "FlashInfer is installed", "ok": flashinfer is not None}
        if flashinfer is not None:
            builds.append(compile.start([*compile.KINDS, *compile.LAYERS]))

    def compiled() -> Rows:
        kinds.clear()
        for build in builds:
            yield from build.wait(min(180.0, device.left() - 150))
            kinds.update(build.built)

    def attended() -> Rows:
        try:
            yield from attention.check(device, kinds)
            for build in builds:
                before = set(kinds)
                yield from build.stop()
                kinds.update(build.built)
                if late := kinds - before:
                    yield from attention.check(device, late)
        finally:  # out of time, too: what is measured next should have the machine to itself
            for build in builds:
                build.kill()

    first: list[tuple[str, float, Callable[[], Rows]]] = [("compilers", 10, start_compilers)] if device.cuda else []
    then: list[tuple[str, float, Callable[[], Rows]]] = [("compiled", 190, compiled)] if device.cuda else []
    return [
        *first,
        ("sampling", 40, lambda: sampling.check(device)),
        ("greedy", 90, lambda: engine.greedy(device)),
        *then,
        ("attention", 70, attended),
        ("logits", 30, lambda: engine.logits(device)),
        ("memory", 60, lambda: memory.check(device)),
        ("speed", 60, lambda: speed.measure(device, kinds if device.cuda else set())),
        ("serving", 150, lambda: serving.serve(device)),
        ("steady", 80, lambda: steady.measure(device, kit)),
        ("arrival", 60, lambda: arrival.measure(device, kit)),
        ("peers", 90, lambda: peers.measure(device, kit)),
        ("cold", 120, lambda: cold.measure(device, kit)),
        ("offline", 80, lambda: offline.measure(device, kit)),
        ("ahead", 150, lambda: ahead.measure(device, kit)),
        ("worth", 120, lambda: worth.measure(device, kit)),
        ("lora", 60, lambda: lora.measure(device, kit)),
        ("quantized", 90, lambda: quantized.measure(device, kit)),
        ("fused", 60, lambda: fused.measure(device)),
    ]


def carry_out(report: Any, name: str, seconds: float, stage: Callable[[], Rows]) -> None:
    """The rows of one stage until it ends, fails, or its time is over: that is looked at between rows."""
    from bench.gpu.kit import release

    report.begin(name)
    ends = time.monotonic() + seconds
    rows = stage()
    try:
        for row in rows:
            report.add(name, row)
            if time.monotonic() > ends:
                report.end(name, f"out of time after {seconds:.0f} s")
                return
        report.end(name, "done")
    except Exception as error:
        import traceback

        traceback.print_exc()
        report.end(name, f"failed: {type(error).__name__}: {str(error)[-600:]}")
    finally:
        rows.close()  # type: ignore[attr-defined]  # a generator
        release()


if __name__ == "__main__":
    sys.exit(main())
