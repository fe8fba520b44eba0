"""kill -9 of the batch server and of workers, a router that is away, and a bucket: every line has exactly one result."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai.types import Batch
from tests.router.batch.deployment import Deployment, create, line, results, wait
from tests.servers.s3_server import S3Server, install
from tests.system.processes import until
from tests.worker.api.process import WorkerProcess

from fairlead.random_model.build import make_model

SEED = 20_261


def completed(client: openai.OpenAI, batch: Batch) -> int:
    """Return the completed lines; 0 while the batch server does not answer."""
    try:
        counts = client.batches.retrieve(batch.id).request_counts
    except (openai.InternalServerError, openai.APIConnectionError):
        return 0
    assert counts is not None
    return counts.completed + counts.failed


def check(client: openai.OpenAI, batch: Batch, good: set[str], bad: set[str]) -> None:
    """Fail unless each line has exactly one result, in the right file."""
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": len(good | bad), "completed": len(good), "failed": len(bad)}
    output, errors = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert output.keys() == good and errors.keys() == bad
    assert {each["response"]["status_code"] for each in output.values()} == {200}
    assert {each["response"]["status_code"] for each in errors.values()} <= {400, 422}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("batch-model") / "tiny", vocab=1024, layers=1)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    if problem := install():
        pytest.skip(f"no S3 server: {problem}")
    with S3Server() as server:
        server.make("batches")
        yield server


def test_kills_of_batch_server_and_worker_lose_and_repeat_no_line(model: Path, tmp_path: Path) -> None:
    """A real worker, 120 lines of which every tenth is invalid, and kills at random counts of results."""
    chance = random.Random(SEED)
    worker = WorkerProcess(model, tmp_path / "worker", "--served-model-name", "tiny")
    deployment = Deployment(tmp_path, workers=[f"127.0.0.1:{worker.port}"], flags=("--max-concurrency", "8"))
    try:
        worker.wait_ready()
        with deployment:
            client = deployment.client()
            lines = [line(f"r{n}", **({"max_tokens": -1} if n % 10 == 3 else {"prompt": f"line {n}", "max_tokens": 8})) for n in range(120)]
            batch = create(client, lines)
            for number, count in enumerate(sorted(chance.sample(range(5, 100), 4))):
                until(lambda count=count: completed(client, batch) >= count, f"{count} results")  # type: ignore[misc]
                if number == 2:
                    os.killpg(worker.process.pid, signal.SIGKILL)
                    worker.kill()
                    worker = WorkerProcess(model, tmp_path / "worker", "--served-model-name", "tiny")
                    deployment.list_workers([f"127.0.0.1:{worker.port}"])
                deployment.kill_and_restart()
            seen = wait(client, batch, seconds=180)
            bad = {f"r{n}" for n in range(3, 120, 10)}
            check(client, seen, {f"r{n}" for n in range(120)} - bad, bad)
    finally:
        worker.kill()


def test_a_router_that_is_away_fails_no_line(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        client = deployment.client()
        batch = create(client, [line(f"r{n}", prefill_seconds=0.2) for n in range(60)])
        until(lambda: completed(client, batch) >= 5, "five results")
        deployment.router.kill()
        until(lambda: deployment.batch_metric('lines_total{outcome="retried"}') > 0, "a line was refused")
        deployment.router.start()
        check(client, wait(client, batch), {f"r{n}" for n in range(60)}, set())


def test_a_service_without_workers_is_waited_for(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        assert deployment.worker is not None
        deployment.worker.kill()
        client = deployment.client()
        batch = create(client, [line(f"r{n}") for n in range(10)])
        until(lambda: deployment.batch_metric('lines_total{outcome="retried"}') >= 1, "lines got 503")
        deployment.worker.start()
        check(client, wait(client, batch), {f"r{n}" for n in range(10)}, set())


@pytest.mark.parametrize("status", ["cancelled", "expired"])
def test_a_restart_while_a_batch_ends_keeps_its_end(tmp_path: Path, status: str) -> None:
    """The batch server is dead when the batch is due to end, and ends it after its restart."""
    with Deployment(tmp_path) as deployment:
        client = deployment.client()
        window = "4s" if status == "expired" else "24h"
        batch = create(client, [line("fast"), *(line(f"slow-{n}", prefill_seconds=600) for n in range(5))], window=window)
        until(lambda: completed(client, batch) == 1, "the fast line has its result")
        if status == "cancelled":
            client.batches.cancel(batch.id)
        deployment.kill_and_restart()
        seen = wait(client, batch)
        assert seen.status == status
        output, errors = results(client, seen.output_file_id), results(client, seen.error_file_id)
        assert output.keys() == {"fast"} and errors.keys() == {f"slow-{n}" for n in range(5)}


def test_a_bucket_keeps_a_batch_through_kills(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1", "ENDPOINT_URL": s3.url}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    chance = random.Random(SEED)
    with Deployment(tmp_path, "s3://batches/one/two") as deployment:
        client = deployment.client()
        batch = create(client, [line(f"r{n}", prefill_seconds=0.3) for n in range(80)])
        for count in sorted(chance.sample(range(1, 60), 2)):
            until(lambda count=count: completed(client, batch) >= count, f"{count} results")  # type: ignore[misc]
            deployment.kill_and_restart()
        seen = wait(client, batch)
        check(client, seen, {f"r{n}" for n in range(80)}, set())
        for file in (seen.output_file_id, seen.input_file_id):
            assert file is not None and client.files.delete(file).deleted
        deployment.kill_and_restart()
        deployment.wait_for_batch_server()
        assert not client.files.list().data and [each.id for each in client.batches.list()] == [batch.id]


def test_two_processes_on_a_bucket_store_no_line_twice(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1", "ENDPOINT_URL": s3.url}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with Deployment(tmp_path, "s3://batches/shared") as deployment:
        assert deployment.worker is not None
        client = deployment.client()
        deployment.worker.signal(signal.SIGSTOP)  # no line is answered before both processes have sent some
        batch = create(client, [line(f"r{n}") for n in range(60)])
        wait(client, batch, ("in_progress",))
        other = tmp_path / "other"
        other.mkdir()
        second = Deployment(other, "s3://batches/shared", workers=[])
        second.redirect_batch_server_to(deployment.url)
        second.batch.start()
        try:
            second.wait_for_batch_server()
            for one in (deployment, second):
                until(lambda one=one: one.batch_metric("lines_in_flight") > 0, "lines were sent")  # type: ignore[misc]
            deployment.worker.signal(signal.SIGCONT)
            until(lambda: deployment.batch.has_ended or second.batch.has_ended, "one of the two saw the conflict and ended")
        finally:
            second.batch.kill()
        deployment.kill_and_restart()
        check(client, wait(client, batch), {f"r{n}" for n in range(60)}, set())
