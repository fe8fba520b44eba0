"""`fairlead-prefetch` fills a cache, and real workers then start without a download. `pytest -s` prints the figures."""

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
RATE = 1e6
"""Bytes per second of the simulated network."""
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("hub") / "model", hidden=256, intermediate=1024)


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    with Hub(model, RATE) as server:
        yield server


def environment(hub: Hub, cache: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "FAIRLEAD_MODEL_CACHE": str(cache)}


def prefetch(hub: Hub, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(WORKER), str(WORKER.parent / "index"), str(WORKER.parent / "common")))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-m", "fairlead_worker.weights.prefetch", f"--cache={cache}", *arguments]
    return subprocess.run(command, env={**kept, **environment(hub, cache), "PYTHONPATH": path}, capture_output=True, text=True, timeout=200)


def start_worker(hub: Hub, cache: Path, folder: Path) -> tuple[float, float]:
    """Return the seconds from a worker's start until it is ready, and those of its download, as it reports them."""
    worker = WorkerProcess(Path("/none"), folder, "--model", "hf://tiny/model", **environment(hub, cache))
    try:
        worker.wait_ready()
        seconds = worker.client.get("/ready").json()["start_up_seconds"]  # the log omits phases of less than 0.05 s
        return sum(seconds.values()) - seconds.get("join", 0.0), seconds.get("download", 0.0)
    finally:
        worker.stop()


def test_a_worker_starts_without_a_download_once_the_cache_is_filled(hub: Hub, model: Path, tmp_path: Path) -> None:
    size = (model / WEIGHTS).stat().st_size
    empty, download = start_worker(hub, tmp_path / "empty", tmp_path / "first")
    assert hub.fetched.count(WEIGHTS) == 1
    done = prefetch(hub, tmp_path / "filled", "hf://tiny/model")
    assert done.returncode == 0, done.stderr
    assert "download 100 %" in done.stderr and hub.fetched.count(WEIGHTS) == 2
    filled, check = start_worker(hub, tmp_path / "filled", tmp_path / "second")
    assert hub.fetched.count(WEIGHTS) == 2, "the worker downloads nothing"
    transfer = size / RATE
    print(f"\n{size / 1e6:.1f} MB at {RATE / 1e6:.0f} MB/s: ready in {empty:.1f} s (download {download:.1f} s), ", end="")
    print(f"from the prefetched cache in {filled:.1f} s (check {check:.1f} s)")
    assert download > transfer > 2 * check, "other phases depend on the load of the machine"


def test_a_failure_is_the_last_line_and_the_exit_status(hub: Hub, tmp_path: Path) -> None:
    done = prefetch(hub, tmp_path, "hf://gated/model")
    assert done.returncode == 1
    assert "cannot load model hf://gated/model: the repository is gated (403)" in done.stderr.splitlines()[-1]
