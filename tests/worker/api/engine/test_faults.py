"""Disconnects, engine failures and signals: streams end cleanly, pages are freed, and the process reports why it ended."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.servers.redis_server import RedisServer
from tests.worker.api.process import WorkerProcess, until
from tokenizers import Tokenizer

from fairlead_index.reader import IndexReader

LONG = {"prompt": "A long story. " * 10, "max_tokens": 3500, "ignore_eos": True, "temperature": 0.5}
Start = Callable[..., WorkerProcess]


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_aborts_the_request(shared: WorkerProcess, stream: bool) -> None:
    until(lambda: shared.load()["running"] == 0, "idle")
    free, aborts = shared.load()["pages_free"], _aborts(shared)
    if stream:
        with shared.stream("/v1/completions", **LONG, n=2) as (_, events):
            next(events)
            until(lambda: shared.load()["running"] == 2, "running")
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{shared.url}/v1/completions", json=LONG | {"n": 2}, timeout=0.3)
    until(lambda: shared.load()["running"] == 0, "aborted", seconds=2)
    until(lambda: shared.load()["pages_free"] == free, "pages back", seconds=2)
    until(lambda: _aborts(shared) == aborts + 2, "counted", seconds=2)


def _aborts(worker: WorkerProcess) -> int:
    text = worker.client.get("/metrics").text
    (line,) = (line for line in text.splitlines() if line.startswith('fairlead_request_success_total{finished_reason="abort"'))
    return int(float(line.split()[-1]))


async def _wait_listed(reader: IndexReader, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(await reader.workers()) != count:
        assert time.monotonic() < deadline, f"not {count} workers in the index"


async def test_a_killed_engine_ends_streams_and_the_worker_and_leaves_the_index_first(start: Start, redis: RedisServer) -> None:
    worker = start(FAIRLEAD_REDIS_URL=redis.url, FAIRLEAD_INDEX_NAMESPACE="test/dying").wait_ready()
    reader = IndexReader(redis.url, "test/dying", deadline=5)
    await _wait_listed(reader, 1)
    with worker.stream("/v1/completions", **LONG) as (_, events):
        next(events)
        os.kill(worker.engine_pid, signal.SIGKILL)
        *_, last = events
        assert isinstance(last, dict)
        assert "SIGKILL" in last["error"]["message"]
    refused = worker.post("/v1/completions", prompt="x")
    assert (refused.status_code, refused.headers["x-fairlead-retry"]) == (503, "other")
    assert worker.client.get("/health").status_code == 503
    assert worker.client.get("/ready").json()["phase"] == "failed"
    await _wait_listed(reader, 0)
    assert worker.process.poll() is None, "the worker still says why"
    await reader.close()
    assert worker.wait(15) == 1
    assert "the engine process was ended by SIGKILL" in worker.log.read_text().splitlines()[-1]
    assert "SIGKILL" in worker.termination_log.read_text()


def test_a_frozen_worker_goes_on_and_a_hung_engine_counts_as_dead(start: Start) -> None:
    """`docker pause`, a debugger, a paused machine: the API process reads the engine's heartbeats late, and all of them are there."""
    worker = start("--limits", "engine_timeout=2").wait_ready()
    worker.process.send_signal(signal.SIGSTOP)
    time.sleep(3)  # the elapsed time is under test
    worker.process.send_signal(signal.SIGCONT)
    for _ in range(3):
        assert worker.complete(prompt="x", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
    with worker.stream("/v1/completions", **LONG) as (_, events):
        next(events)
        os.kill(worker.engine_pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as beside:
            num_waiting = beside.submit(httpx.post, f"{worker.url}/v1/completions", json={"prompt": "x"}, timeout=60)
            *_, last = events
        assert isinstance(last, dict)
        assert "the engine sent no message for" in last["error"]["message"]
        refused = num_waiting.result()
        assert (refused.status_code, refused.headers["x-fairlead-retry"]) == (503, "lost")  # a router counts these
    assert worker.wait(15) == 1
    assert "the engine sent no message for" in worker.termination_log.read_text()


def test_sigterm_finishes_streams_and_refuses_new_requests(start: Start) -> None:
    worker = start("--drain-timeout", "60").wait_ready()
    engine = worker.engine_pid
    with worker.stream("/v1/completions", **LONG | {"max_tokens": 1000}) as (_, events):
        next(events)
        worker.process.send_signal(signal.SIGTERM)
        until(lambda: worker.load()["draining"], "draining")
        refused = worker.post("/v1/completions", prompt="x")
        assert (refused.status_code, refused.headers["x-fairlead-retry"]) == (503, "other")
        assert refused.headers["connection"] == "close"
        assert worker.client.get("/ready").status_code == 503
        assert (worker.client.get("/livez").status_code, worker.client.get("/health").status_code) == (200, 503)
        *_, finish, done = events
        assert done == "[DONE]"
        assert finish["choices"][0]["finish_reason"] == "length"
    assert worker.wait() == 0
    until(lambda: not _alive(engine), "engine gone")


def test_a_second_signal_ends_worker_and_engine_at_once(start: Start) -> None:
    worker = start().wait_ready()
    engine = worker.engine_pid
    with worker.stream("/v1/completions", **LONG, n=8) as (_, events):
        next(events)
        worker.process.send_signal(signal.SIGTERM)
        until(lambda: worker.load()["draining"], "draining")
        began = time.monotonic()
        worker.process.send_signal(signal.SIGINT)
        with pytest.raises(httpx.HTTPError):
            list(events)
    assert worker.wait() == 128 + signal.SIGINT
    assert time.monotonic() - began < 3
    until(lambda: not _alive(engine), "engine gone", seconds=5)


def test_a_model_that_cannot_load_says_why(start: Start) -> None:
    worker = start("--model", "file:///no/such/folder")
    seen: list[httpx.Response] = []

    def look() -> bool:
        try:
            seen.append(worker.client.get("/ready"))
        except httpx.HTTPError:
            return True
        return worker.process.poll() is not None

    until(look, "ended")
    assert worker.wait() == 1
    reasons = [response.json()["reason"] for response in seen]
    assert all(response.status_code == 503 for response in seen)
    for text in (reasons[-1], worker.termination_log.read_text(), worker.log.read_text().splitlines()[-1]):
        assert "cannot load model file:///no/such/folder" in text
        assert "/no/such/folder" in text


def test_a_token_id_without_an_embedding_row_is_refused_without_harm_and_the_drain_has_an_end(
    start: Start, model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model, tmp_path / "stray")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    while tokenizer.get_vocab_size() <= rows:
        tokenizer.add_special_tokens([stray := f"<stray-{tokenizer.get_vocab_size()}>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    worker = start("--model", f"file://{folder}", "--drain-timeout", "0.3").wait_ready()
    refused = worker.post("/v1/completions", prompt=f"a {stray}", max_tokens=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert f"token id {rows} is not in the model's vocabulary of {rows}" in refused.json()["error"]["message"]
    with worker.stream("/v1/completions", **LONG, n=8) as (_, events):
        next(events)
        worker.process.send_signal(signal.SIGTERM)
        *_, last = events
        assert "shutting down" in last["error"]["message"]
    assert worker.wait() == 0


def test_sigint_while_loading_ends_quickly(start: Start) -> None:
    worker = start()
    assert worker.client.get("/livez").status_code == 200
    assert worker.post("/v1/completions", prompt="x").status_code == 503
    assert worker.client.get("/v1/models").status_code == 503
    began = time.monotonic()
    assert worker.stop(signal.SIGINT) == 0
    assert time.monotonic() - began < 5


def test_many_clients_at_once(shared: WorkerProcess) -> None:
    answers: list[int] = []

    def ask(number: int) -> None:
        body = {"prompt": f"Client {number} asks", "max_tokens": 20 + number, "ignore_eos": True}
        answers.append(httpx.post(f"{shared.url}/v1/completions", json=body, timeout=60).json()["usage"]["completion_tokens"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [20 + number for number in range(24)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
