"""Start-up phases and their times in the log, `/ready` and metrics; a stop while the server's packages are imported."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.worker.api.process import until

from fairlead_worker.api.engine.start_up import StartUp


def test_phases_are_timed_in_the_order_in_which_they_come() -> None:
    start = StartUp(100.0)
    for phase, now in (
        ("imports", 101.0),
        ("weights", 104.0),
        ("weights", 110.0),
        ("compile", 114.0),
        ("cache", 116.5),
        ("compile", 117.0),
    ):
        start.enter(phase, now)
    assert start.finish(118.0) == "18.0 s from its start: start 1.0, imports 3.0, weights 10.0, compile 3.5, cache 0.5"
    start.join(118.4)
    assert start.seconds["join"] == pytest.approx(0.4)
    assert sum(start.seconds.values()) == pytest.approx(18.4), "nothing is counted twice"


def test_a_stop_before_the_server_leaves_no_engine_and_no_folder(tmp_path: Path) -> None:
    """The engine starts before the server's packages are imported, which takes seconds."""
    command = [sys.executable, "-m", "fairlead_worker.main", "--host", "127.0.0.1", "--port", "0", "--model", f"file://{tmp_path}"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "FAIRLEAD_TERMINATION_LOG": str(tmp_path / "reason")}
    worker = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(lambda: Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text(), "the engine")
    assert list(tmp_path.glob("fairlead-*")), "the folder of the channel"
    worker.send_signal(signal.SIGTERM)
    output, _ = worker.communicate(timeout=120)
    assert worker.returncode == 0 and "listening on" not in output, output
    assert not list(tmp_path.iterdir())
