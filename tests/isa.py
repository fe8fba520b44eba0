"""Run the engine, exactness and kernel tests at each CPU level below this machine's: `python -m tests.isa`, as `make test-isa` does.

A skip is right where the level lacks what the test needs. So skips are counted for each level and bounded, and a test that is skipped at
every level of this machine is a failure: no run would ever execute it.
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
SKIPS = {"none": 746, "avx2": 12, "avx512": 0, "avx512_bf16": 0, "amx": 0}
"""The most skips of each level. `none` has no compiled kernels to test; oneDNN packs no bfloat16 without AVX512."""
OWN = Path("build/test-outcomes.json")
"""What `make test` recorded at this machine's own level."""
KERNELS_ALONE = ("avx512",)
"""Levels at which only the kernels' tests run: they lie between two full levels and differ from them in instructions only."""


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
        counts = Counter(outcomes.values())
        print(f"{level:12}" + "".join(f"{counts[kind]:6} {kind}" for kind in ("passed", "failed", "skipped")))
    print(*wrong, sep="\n")
    return 1 if failed or wrong else 0


def problems(found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a line for each level with more skips than `SKIPS`, and for each test that every level skips. found: outcomes by level."""
    wrong = []
    for level, outcomes in found.items():
        skips = sum(outcome == "skipped" for outcome in outcomes.values())
        if skips > SKIPS[level]:
            wrong.append(f"{skips} tests are skipped at CPU level {level}, more than the {SKIPS[level]} that tests/isa.py allows")
    for test in sorted(set().union(*found.values())):
        if all(outcomes.get(test, "skipped") == "skipped" for outcomes in found.values()):
            wrong.append(f"{test} is skipped at every CPU level of this machine")
    return wrong


def _run(level: str, outcomes: Path) -> int:
    limits = {name for each in LIMITS.values() for name in each}
    environment = {name: value for name, value in os.environ.items() if name not in limits} | {VARIABLE: level, OUTCOMES: str(outcomes)}
    tests = KERNELS if level in KERNELS_ALONE else (*KERNELS, *ENGINE)
    command = [sys.executable, "-m", "pytest", "-q", "-r", "fE", "-n", "2", "--dist", "worksteal", "--hypothesis-profile=ci", *tests]
    return subprocess.run(command, env=environment).returncode


def _select(outcomes: dict[str, str]) -> dict[str, str]:
    return {test: outcome for test, outcome in outcomes.items() if test.startswith((*KERNELS, *ENGINE))}


if __name__ == "__main__":
    sys.exit(main())
