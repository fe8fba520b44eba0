"""The GPU path on this machine: correctness against transformers and the reference backend, then speed.

Stages run one after the other: first correctness and the headline figures, in three minutes. A stage that is over its time limit is
stopped, and the next ones run. Every finding is written to the report when it is made. Without a GPU the check prints one line and exits
with 0. It exits with 1 if a check fails. `--bundle` provides the packages that this machine lacks (see `make gpu-bundle`).
"""

import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common.report import ROOT, make_parser

if TYPE_CHECKING:
    from bench.gpu.compile import Builds

SECONDS = 460.0
"""Time limit of all stages together. With the start this is under eight minutes."""
ON_REQUEST = (
    "structured",
    "fused_sampling",
    "kernel_busy_time",
    "prompt_arrival",
    "piecewise",
    "drafts",
    "overlap",
    "lora",
    "transformers_batching",
    "worker_start",
    "quantized",
    "int4_layers",
    "experts",
    "groups",
    "latents",
    "ranks",
)
"""Stages whose figures are better with the time that `--only` gives them: a run of all stages measures as many rows as fit.

`--only targets` runs all of them after the kernels are compiled, `--only points` the most valuable ones within ten minutes.
"""
POINTS = ("headline", "structured", "fused_sampling", "drafts", "prompt_arrival", "worker_start", "int4_layers", "experts", "quantized")
"""Stages whose bars decide whether the worker is as fast as its device allows, one or two of each part of it, beside `sampling`."""
GROUPS = {"points": ("compilers", "sampling", "compiled", *POINTS), "targets": ("compilers", "compiled", *ON_REQUEST)}
"""Each group's stages run in this order, and share the time by their limits."""
FIRST = {"compilers": 5.0, "sampling": 35.0, "greedy": 20.0, "compiled": 55.0, "attention": 15.0, "headline": 50.0}
"""Stages of the first three minutes of a run of all stages, with their seconds at most. The others share the rest by their own limits."""
Rows = Iterator[dict[str, Any]]
Stage = tuple[str, float, Callable[[], Rows]]
"""Name, seconds at most, and what gives the rows."""


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__name__, __doc__)
    parser.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cpu runs the same stages with tiny models and FlashInfer interpreted in torch",
    )
    parser.add_argument(
        "--bundle", type=Path, help="folder that `make gpu-bundle` made: packages that this machine lacks are taken from there"
    )
    parser.add_argument("--out", type=Path, help="folder for the report DATE-COMMIT.json (default on a GPU: bench/results/gpu)")
    parser.add_argument(
        "--only",
        default="",
        help=f"stages, comma-separated, each with all of its rows (default: all stages; `points`: {', '.join(POINTS)}; "
        f"`targets`: {', '.join(ON_REQUEST)})",
    )
    parser.add_argument("--compare", action="store_true", help="serve the same model with vLLM and SGLang too, if they are installed")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of all stages together (default: %(default)s)")
    given = parser.parse_args(arguments)
    if given.bundle is not None and "GPU_CHECK_UNPACKED" not in os.environ:
        from bench.gpu.bundle import unpack

        os.environ |= {"GPU_CHECK_UNPACKED": "1", "PYTHONPATH": unpack(given.bundle)}
        os.execv(sys.executable, [sys.executable, "-m", "bench", "gpu/check", *(sys.argv[1:] if arguments is None else arguments)])
    # FlashInfer calls ninja by its name, which may be installed beside the interpreter alone.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of a time limit from outside
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: no GPU found on this machine (torch.cuda.is_available() is false); nothing was checked")
        return 0
    return run(given.device, given.out, given.only, given.seconds, given.json, given.compare)


def run(kind: str, out: Path | None, only: str, seconds: float, file: Path | None = None, compares: bool = False) -> int:
    """Run the stages that `only` names (names of stages and of groups, comma-separated; empty: the usual ones).

    The report goes to `file`, or into the folder `out`.
    """
    named = [name for name in only.split(",") if name]
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_CHECK_TMP")) as models:
        return _run(kind, out, named, time.monotonic() + seconds, Path(models), file, compares)


def _run(kind: str, out: Path | None, named: list[str], ends: float, models: Path, file: Path | None, compares: bool) -> int:
    import torch

    from bench.gpu.compile import Builds
    from bench.gpu.device import Device
    from bench.gpu.report import Report

    device = Device(torch.device(kind), kind == "cpu", ends, models)
    folder = out or (ROOT / "bench" / "results" / "gpu" if device.cuda else None)
    report = Report(folder, device.facts(), named, file)
    builds: list[Builds] = []
    wanted = {stage for name in named for stage in GROUPS.get(name, (name,))} | ({"compare"} if compares and named else set())
    known = stages(device, builds)
    if unknown := wanted - {name for name, _, _ in known} - {"compilers", "compiled"}:
        raise SystemExit(
            f"gpu-check: no stage is called {', '.join(sorted(unknown))}: choose from {', '.join(name for name, _, _ in known)}"
        )
    ordered = [*dict.fromkeys(stage for name in named for stage in GROUPS.get(name, ())), *(name for name, _, _ in known)]
    known.sort(key=lambda one: ordered.index(one[0]))
    shares = not wanted or bool(GROUPS.keys() & set(named))
    try:
        chosen = [one for one in known if one[0] in wanted] if wanted else [one for one in known if compares or one[0] != "compare"]
        for place, (name, bound, stage) in enumerate(chosen):
            if shares:
                bound = seconds_for((name, bound, stage), chosen[place + 1 :], device.left())
            if device.left() < 5:
                report.end(name, "skipped: no time was left")
                continue
            if name in ON_REQUEST:  # they are measured without compilers beside them
                for build in builds:
                    build.kill()
            carry_out(report, name, min(bound, device.left()), stage)
    except KeyboardInterrupt:  # a time limit from outside: the findings so far are printed all the same
        report.end(name, "failed: interrupted")
    finally:
        for build in builds:
            build.kill()
    print(report.summary(), flush=True)
    if report.path is not None:
        print(f"written: {report.path}", flush=True)
    return 1 if report.failed else 0


def seconds_for(stage: Stage, later: Sequence[Stage], left: float) -> float:
    """Return the limit of `stage` in a run of all stages, before `later`, with `left` seconds for all of them.

    A stage that ends early leaves its time to the others.
    """
    name, most, _ = stage
    if name in FIRST:
        return min(FIRST[name], most, left)
    return min(most, left * most / (most + sum(other for _, other, _ in later)))


def stages(device: Any, builds: "list[Builds]") -> list[Stage]:
    """Return all stages in the order of a run. Those that share a loaded model follow each other.

    Kernels are compiled beside the first stages, which need none of them. `builds`: where the running compilers are kept.
    """
    from bench.gpu import compile
    from bench.gpu.shared_model import Kit
    from bench.gpu.stages import (
        attention,
        compare,
        drafts,
        groups,
        headline,
        kernel_busy_time,
        memory,
        overlap,
        piecewise,
        prompt_arrival,
        ranks,
        sampling,
        serving,
        step_time,
        structured,
        transformers_batching,
        transformers_match,
        worker_start,
    )
    from bench.gpu.stages.layers import experts, int4_layers, latents, lora, quantized

    kinds, kit = set(compile.KINDS), Kit(device)

    def start_compilers() -> Rows:
        yield compile.tools()
        flashinfer = importlib.util.find_spec("flashinfer")
        yield {"what": "FlashInfer is installed", "ok": flashinfer is not None}
        if flashinfer is not None:
            builds.append(compile.start([*compile.KINDS, *compile.FUSED]))

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

    def alone(stage: Callable[[], Rows]) -> Rows:
        """Run a stage that needs the device's memory for itself."""
        kit.drop()
        yield from stage()

    first: list[Stage] = [("compilers", 10, start_compilers)] if device.cuda else []
    then: list[Stage] = [("compiled", 190, compiled)] if device.cuda else []
    return [
        *first,
        ("sampling", 40, lambda: sampling.check(device)),
        ("greedy", 90, lambda: transformers_match.greedy(device)),
        *then,
        ("attention", 70, attended),
        ("headline", 90, lambda: headline.measure(device, kit)),
        ("fused_sampling", 30, lambda: sampling.check_fused(device)),
        ("structured", 40, lambda: structured.measure(device, kit)),
        ("kernel_busy_time", 80, lambda: kernel_busy_time.measure(device, kit)),
        ("prompt_arrival", 60, lambda: prompt_arrival.measure(device, kit)),
        ("piecewise", 60, lambda: piecewise.measure(device, kit)),
        ("drafts", 40, lambda: drafts.measure(device, kit)),
        ("overlap", 150, lambda: overlap.measure(device, kit)),
        ("lora", 60, lambda: lora.measure(device, kit)),
        ("transformers_batching", 90, lambda: transformers_batching.measure(device, kit)),
        ("worker_start", 120, lambda: worker_start.measure(device, kit)),
        ("serving", 150, lambda: alone(lambda: serving.serve(device))),
        ("compare", 300, lambda: compare.measure(device, kit)),
        ("logits", 30, lambda: transformers_match.logits(device)),
        ("memory", 60, lambda: alone(lambda: memory.check(device))),
        ("quantized", 90, lambda: quantized.measure(device, kit)),
        ("int4_layers", 30, lambda: int4_layers.measure(device)),
        ("experts", 60, lambda: experts.measure(device)),
        ("step_time", 60, lambda: step_time.measure(device, kinds if device.cuda else set())),
        ("groups", 60, lambda: alone(lambda: groups.measure(device))),
        ("latents", 180, lambda: alone(lambda: latents.measure(device))),
        ("ranks", 180, lambda: ranks.measure(device, kit)),
    ]


def carry_out(report: Any, name: str, seconds: float, stage: Callable[[], Rows]) -> None:
    """The rows of one stage until it ends, fails, or is stopped because its time is over."""
    from bench.gpu.shared_model import release
    from bench.gpu.time_limit import OutOfTime, time_limit

    report.begin(name)
    ends = time.monotonic() + seconds
    rows = stage()
    try:
        with time_limit(seconds):
            for row in rows:
                report.add(name, row)
                if time.monotonic() > ends:
                    raise OutOfTime
        report.end(name, "done")
    except OutOfTime:
        report.end(name, f"out of time after {seconds:.0f} s")
    except Exception as error:
        import traceback

        traceback.print_exc()
        report.end(name, f"failed: {type(error).__name__}: {str(error)[-600:]}")
    finally:
        rows.close()  # type: ignore[attr-defined]  # a generator
        release()


if __name__ == "__main__":
    sys.exit(main())
