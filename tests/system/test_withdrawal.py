"""A router process and two workers with engines: waiting requests move to a worker that joins, and each is answered once."""

import os
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.servers.redis_server import free_port
from tests.system.processes import Fleet, Process, fetch, until

from fairlead.random_model.build import make_model

REQUESTS = 14
"""As many as a router sends to a worker whose prefill rate it does not know: none waits in the router itself."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    model = make_model(tmp_path / "tiny", "qwen3", vocab=1024, layers=64)  # 2,000 tokens a second: a queue of ten seconds
    fleet = Fleet(tmp_path, workers=0, routers=1)
    for pod in ("first", "second"):
        port = free_port()
        command = [
            "env",
            f"FAIRLEAD_POD_NAME={pod}",
            f"FAIRLEAD_TERMINATION_LOG={os.devnull}",
            sys.executable,
            "-m",
            "fairlead_worker.main",
        ]
        command += ["--host", "127.0.0.1", "--port", str(port), "--model", f"file://{model}", "--served-model-name", "tiny"]
        command += ["--kv-pages", "600", "--threads", "1", "--max-num-seqs", "1"]
        fleet.add_process(pod, f"127.0.0.1:{port}", Process(pod, command, tmp_path / f"{pod}.log"))
    with fleet:
        yield fleet


def test_waiting_requests_move_to_a_worker_that_joins(fleet: Fleet, tmp_path: Path) -> None:
    (url,) = fleet.routers
    draw = random.Random(3)

    def metric(address: str, name: str) -> float:
        text = httpx.get(f"{address}/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name) and line[len(name)] in " {")

    def ask(number: int) -> httpx.Response:
        prompt = draw.choices(range(10, 1000), k=1500)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "ignore_eos": True, "stream": bool(number % 2)}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=120)

    (tmp_path / "workers").write_text(f"{fleet.pods['first']}\n")
    until(lambda: len(fetch(f"{url}/fairlead/workers")["workers"]) == 1, "the router knows one worker")
    with ThreadPoolExecutor(REQUESTS) as pool:
        asked = [pool.submit(ask, number) for number in range(REQUESTS)]
        first, second = (f"http://{fleet.pods[pod]}" for pod in ("first", "second"))
        until(lambda: metric(first, "fairlead_num_requests_waiting") > REQUESTS // 2, "they wait at the first worker", 20)
        (tmp_path / "workers").write_text("".join(f"{address}\n" for address in fleet.pods.values()))
        answers = [one.result() for one in asked]
    assert {answer.status_code for answer in answers} == {200}
    pods = [answer.headers["x-fairlead-pod"] for answer in answers]
    withdrawn = metric(url, "fairlead_router_retries_total")
    assert 0 < pods.count("second") == withdrawn < REQUESTS
    computed = lambda: sum(fetch(f"{worker}/load")["output_tokens"] for worker in (first, second))  # noqa: E731
    until(lambda: computed() >= 3 * REQUESTS, "the workers report what they computed", 20)
    assert computed() == 3 * REQUESTS, "exactly once"
