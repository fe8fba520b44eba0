"""Run the engine, exactness and kernel tests at each CPU level below this machine's: `python -m tests.isa`, as `make test-isa` does.

A skip is right where the level lacks what the test needs, and its reason says so. Any other skip is a failure, and so is each skip from
level `avx512` on: that level has all that these tests need.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.conftest import OUTCOMES

from fairlead_worker.platform.isa import LEVELS, LIMITS, VARIABLE, cpu_level

KERNELS = (
    "tests/worker/kernels/test_attention.py",
    "tests/worker/kernels/test_native.py",
    "tests/worker/native/test_elementwise.py",
    "tests/worker/native/test_gated.py",
    "tests/worker/native/test_ggml.py",
    "tests/worker/native/test_linear.py",
)
ENGINE = (
    "tests/worker/exactness/test_overlap.py",
    "tests/worker/exactness/test_same_step.py",
    "tests/worker/execution/test_host.py",
    "tests/worker/execution/test_batch_invariance.py",
    "tests/worker/execution/test_native_forward.py",
    "tests/worker/model/test_fuse.py",
)
REASON = "CPU"
"""Each skip's reason names it: the only reason for a skip is a CPU, or a forced level, that lacks what the test needs."""
COMPLETE = "avx512"
"""From this level on no test is skipped."""
OWN = Path("build/test-outcomes.json")
"""What `make test` recorded at this machine's own level."""
KERNELS_ALONE = ("avx512",)
"""Levels at which only the kernels' tests run: they lie between two full levels and differ from them in instructions only."""
WITHOUT_KERNELS = ("tests/worker/exactness/test_overlap.py", "tests/worker/model/test_fuse.py")
"""The engine's tests at level `none`: torch computes there what every exactness test compares with at the machine's own level."""


def main() -> int:
    """Return 0 if every test passed and the levels explain the skips."""
    best = LEVELS.index(cpu_level())
    found: dict[str, dict[str, str]] = {}
    failed = []
    for level in LEVELS[: best + 1]:
        own = level == LEVELS[best]
        if own and OWN.exists():  # `make test` has run at this level
            found[level] = _select(json.loads(OWN.read_text()))
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcomes = Path(folder, "outcomes.json")
            print(f"== CPU level {level}", flush=True)
            if _run(level, outcomes):
                failed.append(level)
            found[level] = json.loads(outcomes.read_text()) if outcomes.exists() else {}
    wrong = problems(found)
    for level, outcomes in found.items():
        counts = Counter(outcome.partition(":")[0] for outcome in outcomes.values())
        print(f"{level:12}" + "".join(f"{counts[kind]:6} {kind}" for kind in ("passed", "failed", "skipped")))
    print(*wrong, sep="\n")
    return 1 if failed or wrong else 0


def problems(found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a line for each skip that its level does not explain. found: outcomes by level, as `tests.conftest` records them."""
    wrong = []
    for level, outcomes in found.items():
        for test, outcome in outcomes.items():
            if not outcome.startswith("skipped"):
                continue
            if LEVELS.index(level) >= LEVELS.index(COMPLETE):
                wrong.append(f"{test} is skipped at CPU level {level}, which has all that it needs: {outcome}")
            elif REASON not in outcome:
                wrong.append(f"{test} is skipped at CPU level {level} for another reason than the CPU: {outcome}")
    return wrong


def _run(level: str, outcomes: Path) -> int:
    limits = {name for each in LIMITS.values() for name in each}
    environment = {name: value for name, value in os.environ.items() if name not in limits} | {VARIABLE: level, OUTCOMES: str(outcomes)}
    engine = () if level in KERNELS_ALONE else WITHOUT_KERNELS if level == "none" else ENGINE
    command = [sys.executable, "-m", "pytest", "-q", "-r", "fE", "-n", "2", "--dist", "worksteal", "--hypothesis-profile=ci"]
    return subprocess.run([*command, *KERNELS, *engine], env=environment).returncode


def _select(outcomes: dict[str, str]) -> dict[str, str]:
    return {test: outcome for test, outcome in outcomes.items() if test.startswith((*KERNELS, *ENGINE))}


if __name__ == "__main__":
    sys.exit(main())
