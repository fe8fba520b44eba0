"""Long steps of `make e2e` and `make kubernetes` are never silent: they print when they begin, while they run, and when they end."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import progress

PROGRAM = Path(progress.__file__)


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that progress is written to."""
    path = tmp_path / "printed"
    with path.open("wb") as file:
        monkeypatch.setattr(progress, "_descriptor", file.fileno())
        yield path


def lines(path: Path) -> list[str]:
    found = path.read_text().splitlines()
    assert all(re.match(r"\[ *\d+:\d\d\] ", line) for line in found), "each line begins with the elapsed time"
    return [line.partition("] ")[2] for line in found]


def test_a_step_prints_its_begin_its_end_and_lines_in_between(printed: Path) -> None:
    with progress.step("build", interval=0.05):
        deadline = time.monotonic() + 10
        while len(lines(printed)) < 3:
            assert time.monotonic() < deadline, "a running step prints nothing"
            time.sleep(0.01)
    first, *between, last = lines(printed)
    assert first == "build ..." and last == "build: done in 0 s"
    assert {re.sub(r"\d+", "N", line) for line in between} == {"build: running for N s"}


def test_only_the_innermost_step_prints_while_it_runs(printed: Path) -> None:
    with progress.step("outer", interval=0.02), progress.step("inner", interval=60):
        time.sleep(0.2)
    assert lines(printed) == ["outer ...", "inner ...", "inner: done in 0 s", "outer: done in 0 s"]


def test_a_step_that_fails_says_so(printed: Path) -> None:
    with pytest.raises(ValueError), progress.step("build"):
        raise ValueError
    assert lines(printed)[-1] == "build: failed after 0 s"


def test_a_command_runs_as_a_step_and_keeps_its_exit_status() -> None:
    ran = subprocess.run([sys.executable, str(PROGRAM), "compile", "--", "sh", "-c", "echo output; exit 3"], capture_output=True, text=True)
    assert ran.returncode == 3 and ran.stdout == "output\n"
    assert "compile ...\n" in ran.stderr and "compile: failed after 0 s\n" in ran.stderr
