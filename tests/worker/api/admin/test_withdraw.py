"""`POST /internal/withdraw/ATTEMPT`: a request that has not started leaves; one that has started goes on."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.worker.api.process import WorkerProcess, until

LONG = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture
def worker(start: Callable[..., WorkerProcess]) -> WorkerProcess:
    return start("--max-num-seqs", "1").wait_ready()


def post(worker: WorkerProcess, attempt: str, **fields: Any) -> httpx.Response:
    return worker.client.post("/v1/completions", json=LONG | fields, headers={"x-fairlead-attempt": attempt})


def test_a_waiting_request_leaves_with_503_and_a_running_one_stays(worker: WorkerProcess) -> None:
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(post, worker, "aa")
        until(lambda: worker.metric("fairlead_num_requests_running") == 1, "one running")
        waiting = [pool.submit(post, worker, "bb", **fields) for fields in ({"n": 2}, {"stream": True}, {"max_tokens": 1})]
        until(lambda: worker.metric("fairlead_num_requests_waiting") == 4, "four sequences waiting")
        assert worker.client.post("/internal/withdraw/aa").status_code == 202
        assert worker.client.post("/internal/withdraw/cc").status_code == 404
        assert not any(one.done() for one in waiting)
        assert worker.client.post("/internal/withdraw/bb").status_code == 202, "the latest attempt of a name"
        until(lambda: sum(one.done() for one in waiting) == 1, "one has left")
        (left,) = [one.result() for one in waiting if one.done()]
        assert left.status_code == 503 and left.headers["x-fairlead-retry"] == "withdrawn"
        assert left.json()["error"]["code"] == "withdrawn"
        answers = [one.result() for one in (running, *waiting)]
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 503]
    assert answers[0].json()["usage"]["completion_tokens"] == 1500, "it had started, so nothing changed"
    assert worker.client.post("/internal/withdraw/aa").status_code == 404, "it has ended"
    assert worker.metric("fairlead_num_requests_waiting") == worker.metric("fairlead_num_requests_running") == 0


def test_a_name_that_is_no_attempt_is_refused(shared: WorkerProcess) -> None:
    assert post(shared, "not hex", max_tokens=1).status_code == 400
