"""What every benchmark shares: its options, the facts about the machine, and the JSON report that `--json FILE` writes."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark with the option `--json FILE`. `module`: the benchmark's `__name__`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench {benchmark_name(module)}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, with facts about this machine, to FILE")
    return parser


def benchmark_name(module: str) -> str:
    """Return `engine/step_time` for the module `bench.engine.step_time`."""
    return module.removeprefix("bench.").replace(".", "/")


def write_report(module: str, options: argparse.Namespace, results: object) -> None:
    """Write `results` to the file that `--json` names; do nothing without that option.

    The document has four keys: `benchmark`, `machine` (see `machine_facts`), `options` (without `json`) and `results`.
    """
    if options.json is None:
        return
    chosen = {name: _plain(value) for name, value in vars(options).items() if name != "json"}
    document = {"benchmark": benchmark_name(module), "machine": machine_facts(), "options": chosen, "results": results}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(document, indent=1) + "\n")


def machine_facts() -> dict[str, Any]:
    """Return what decides the figures of a run: CPU, cores, CPU level, torch's version, commit and date (UTC)."""
    from fairlead_worker.platform.isa import cpu_level  # here: `make gpu-check` imports this module before the packages are on the path

    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_level": cpu_level(),
        "torch": torch,
        "commit": revision(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def revision() -> str:
    """Return the commit of the tree: from git, or from the GPU bundle where the tree was copied without git. Else "unknown"."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        described = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed
        described = ""
    bundled = ROOT / "build" / "gpu-bundle" / "commit"
    return described or (bundled.read_text().strip() if bundled.is_file() else "unknown")


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.is_file() else None
    return found[1] if found else platform.processor() or platform.machine()


def _plain(value: object) -> object:
    """Return `value` as JSON can hold it: paths as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | None) else str(value)
