"""Every test runs at one CPU level: the machine's, or the one in `FAIRLEAD_CPU_ISA`. `tests.isa` compares which test ran at which."""

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Before anything imports torch. Threads of OpenMP wait for each other's parts of a small tensor in busy loops: with two threads each, three
# processes on two cores needed 4.5 times the CPU time for the tests of all families. A test of threads asks for more itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from fairlead_worker.platform.isa import CpuLevelError, cpu_level

if TYPE_CHECKING:
    from tests.api.fleet import Pair

OUTCOMES = "FAIRLEAD_TEST_OUTCOMES"
"""Environment variable: a file for the outcome of each test, as JSON."""
_outcomes: dict[str, str] = {}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without collections of garbage, a third of the time: nearly all of a million new objects stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_report_header() -> str:
    try:
        return f"CPU level: {cpu_level()}"
    except CpuLevelError as error:
        pytest.exit(str(error), returncode=4)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a test's outcome: the worst of its phases, and skipped, with the reason, where set-up or the test itself skips."""
    if report.when == "call" or report.outcome != "passed":
        reason = f": {report.longrepr[2]}" if isinstance(report.longrepr, tuple) else ""
        _outcomes[report.nodeid] = report.outcome + reason


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get(OUTCOMES)
    if path and not hasattr(session.config, "workerinput"):  # a worker process of pytest-xdist reports to the main process
        Path(path).write_text(json.dumps(_outcomes))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Pair]":
    """One worker and one router as processes, for the tests of `api` and `browser`: they take 8 s of a core to start."""
    from tests.api.fleet import Pair  # other folders' tests also run in environments without the worker's packages
    from tests.api.fuzz import ROUTER_FLAGS, WORKER_FLAGS

    with Pair(tmp_path_factory.mktemp("api"), *WORKER_FLAGS, router_flags=ROUTER_FLAGS) as pair:
        yield pair
        assert pair.alive, "no request has ended a process"
