"""`fairlead-prefetch` fills a cache, and a real worker then starts without a download."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.worker.api.process import WorkerProcess
from tests.worker.weights.hub import Hub

from fairlead.random_model.build import make_model

WORKER = Path(__file__).parents[3] / "worker"
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(make_model(tmp_path / "hub" / "model", vocab=1024, layers=1)) as server:
        yield server


def environment(hub: Hub, cache: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "FAIRLEAD_MODEL_CACHE": str(cache)}


def prefetch(hub: Hub, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(WORKER), str(WORKER.parent / "index"), str(WORKER.parent / "common")))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-m", "fairlead_worker.weights.prefetch", f"--cache={cache}", *arguments]
    return subprocess.run(command, env={**kept, **environment(hub, cache), "PYTHONPATH": path}, capture_output=True, text=True, timeout=200)


def test_a_worker_starts_without_a_download_once_the_cache_is_filled(hub: Hub, tmp_path: Path) -> None:
    done = prefetch(hub, tmp_path / "cache", "hf://tiny/model")
    assert done.returncode == 0, done.stderr
    assert "download 100 %" in done.stderr and hub.fetched.count(WEIGHTS) == 1
    worker = WorkerProcess(Path("/none"), tmp_path / "run", "--model", "hf://tiny/model", **environment(hub, tmp_path / "cache"))
    try:
        worker.wait_ready()
        assert hub.fetched.count(WEIGHTS) == 1, "the worker downloads nothing"
    finally:
        worker.stop()


def test_a_failure_is_the_last_line_and_the_exit_status(hub: Hub, tmp_path: Path) -> None:
    done = prefetch(hub, tmp_path, "hf://gated/model")
    assert done.returncode == 1
    assert "cannot load model hf://gated/model: the repository is gated (403)" in done.stderr.splitlines()[-1]
