"""A slow load continues; a stuck one ends and reports where. Both report their progress."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.servers import s3_server
from tests.worker.api.process import WorkerProcess, until
from tests.worker.weights.throttle import Throttle

from fairlead_worker.api.engine.client import EngineState
from fairlead_worker.api.engine.load_progress import SILENT_WORK_SECONDS, LoadWatch
from fairlead_worker.platform.processes import Work


@pytest.fixture
def source(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Throttle]:
    """The tiny model in a bucket that lets one large response pass for each permission."""
    problem = s3_server.install()
    if problem:
        pytest.skip(f"no S3 server: {problem}")
    with s3_server.S3Server() as server, Throttle(server.url, small=0) as throttle:
        server.make("models")
        for path in model.iterdir():
            server.put("models", f"tiny/{path.name}", path.read_bytes())
        credentials = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": throttle.url}
        for name, value in credentials.items():
            monkeypatch.setenv(name, value)
        yield throttle


def test_a_slow_load_is_healthy_and_says_its_share_and_a_stuck_one_ends(
    source: Throttle, start: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    source.allow(3)  # the listing and two files; then the bucket sends nothing more
    worker = start("--model", "s3://models/tiny", "--limits", "load_timeout=8", FAIRLEAD_MODEL_CACHE=str(tmp_path / "cache"))
    seen: list[dict[str, Any]] = []

    def downloading() -> bool:
        answer = worker.client.get("/ready")
        assert answer.status_code == 503
        seen.append(answer.json())
        return seen[-1].get("stage") == "Downloading" and seen[-1]["bytes"] > 0

    until(downloading, "a share of the download")
    assert 0 < seen[-1]["bytes"] < seen[-1]["total_bytes"] and 0 <= seen[-1]["percent"] < 100
    assert (worker.client.get("/livez").status_code, worker.client.get("/health").status_code) == (200, 503)
    assert worker.process.wait(60) == 1
    said = worker.termination_log.read_text()
    assert said.startswith("the load has made no progress for ") and "the source has stopped sending: see spec.model.uri" in said


def test_work_counts_where_reports_are_silent_but_not_for_ever_and_not_in_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work()
    monkeypatch.setattr(Work, "measure", lambda session: work)
    state = EngineState(phase="loading", stage="Preparing", last_progress_at=100.0)
    watch = LoadWatch(state, 1)
    work = Work(0, 5.0)
    watch.check(200.0)
    assert state.last_progress_at == 200.0
    watch.check(300.0)
    assert state.last_progress_at == 200.0, "nothing more was done"
    work = Work(2 << 20, 5.0)
    watch.check(400.0)
    assert state.last_progress_at == 400.0
    work = Work(9 << 20, 50.0)
    watch.check(101.0 + SILENT_WORK_SECONDS)
    assert state.last_progress_at == 400.0, "busy, and without a report for too long"
    state.last_progress_at, state.stage = 5000.0, "Downloading"
    work = Work(2 << 20, 500.0)
    watch.check(5100.0)
    assert state.last_progress_at == 5000.0


def test_the_work_of_a_process_is_seen() -> None:
    before = Work.measure(os.getsid(0))
    Path("/proc/self/status").read_bytes()
    assert Work.measure(os.getsid(0)).bytes > before.bytes > 0
