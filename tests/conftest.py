"""Every test runs at one CPU level: what the machine has, or what `FAIRLEAD_CPU_ISA` forces. `tests.isa` compares what ran at which."""

import json
import os
from pathlib import Path

import pytest

from fairlead_worker.isa import CpuLevelError, cpu_level

OUTCOMES = "FAIRLEAD_TEST_OUTCOMES"
"""Environment variable: a file for the outcome of each test, as JSON."""
_outcomes: dict[str, str] = {}


def pytest_report_header() -> str:
    try:
        return f"CPU level: {cpu_level()}"
    except CpuLevelError as error:
        pytest.exit(str(error), returncode=4)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test's outcome is the worst of its phases; skipped where set-up or the test itself skips."""
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get(OUTCOMES)
    if path and not hasattr(session.config, "workerinput"):  # a process of pytest-xdist's tells the first one
        Path(path).write_text(json.dumps(_outcomes))
