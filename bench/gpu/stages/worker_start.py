"""Stage: a worker's start, with the weights in the page cache, to ready: with default flags, and without CUDA graphs and overlap.

A start has no roofline: compilers, recording and processes take most of it. The 64 streams have one.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from bench.gpu.device import Device
from bench.gpu.model import saved
from bench.gpu.report import beside
from bench.gpu.roofline import rates_of
from bench.gpu.shared_model import Kit
from bench.gpu.stages.serving import ask, worker

WAYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("default flags", ()),
    ("no graphs, no overlap", ("--overlap", "off", "--max-cudagraph-capture-size", "0")),
)


def measure(device: Device, kit: Kit) -> Iterator[dict[str, Any]]:
    """For each set of flags: seconds from the process's start to ready, by phases, and 64 streams at once."""
    rates = rates_of(device)
    kit.drop()  # a worker wants the whole device
    shape = "tiny" if device.tiny else "8b"
    streams, prompt, new = (64, 1024, 128) if not device.tiny else (2, 20, 4)
    with saved(device, shape) as model:
        for path in model.iterdir():  # into the page cache, where they are not
            with path.open("rb") as file:
                while file.read(1 << 26):
                    pass
        for what, flags in WAYS[:1] if device.tiny else WAYS:
            try:
                with worker(device, model, *flags) as served:
                    yield beside({"what": f"start, {what}", "seconds": served.seconds, **served.row}, "seconds", most=20)
                    yield beside({"what": f"imports, {what}", "seconds": served.row["imports_s"]}, "seconds", most=4)
                    yield ask(served.url, model.name, shape, rates, streams, prompt, new) | {"with": what}
            except Exception as error:  # whatever it dies of: the other flags may tell something yet
                yield {"what": f"start, {what}", "ok": False, "said": str(error)[-600:]}
    yield {"what": "the slowest imports of the engine", "ms": slowest_imports()}


def slowest_imports(count: int = 12) -> dict[str, float]:
    """Return the modules of the engine that take the most milliseconds, without those that they import (`python -X importtime`)."""
    script = "from fairlead_worker.model.lean import import_transformers as run; run(); import fairlead_worker.execution.runner_builder"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", script], check=True, capture_output=True, text=True)
    found = {name: int(spent) / 1e3 for spent, name in re.findall(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", done.stderr, re.M)}
    return dict(sorted(found.items(), key=lambda item: -item[1])[:count])
