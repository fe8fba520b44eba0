"""`priority` reaches the engine."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.worker.api.process import WorkerProcess, until


def finished_in_turn(worker: WorkerProcess, requests: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names in the order in which their requests ended, from the worker's log, because client threads may overtake each other.
    The worker runs one request at a time, and the first request runs until all others wait."""

    def ask(name: str) -> None:
        body = {"prompt": f"{name} " * 8, "max_tokens": 12, "ignore_eos": True, **requests[name]}
        answer = worker.client.post("/v1/completions", json=body, headers={"x-request-id": name})
        assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(len(requests)) as pool:
        asked = [pool.submit(ask, next(iter(requests)))]
        until(lambda: worker.metric("fairlead_num_requests_running") == 1, "the first one running")
        for waiting, name in enumerate(list(requests)[1:], 1):
            asked.append(pool.submit(ask, name))
            until(lambda: worker.metric("fairlead_num_requests_waiting") == waiting, f"{waiting} waiting")  # noqa: B023
        for each in asked:
            each.result()

    def ended() -> list[str]:
        finished = re.findall(r'finished \{"request":"(\w+)"', worker.log.read_text())
        return [name for name in finished if name in requests]

    until(lambda: len(ended()) == len(requests), "a line for each")
    return ended()


def test_lower_numbers_of_priority_go_first(narrow: WorkerProcess) -> None:
    order = finished_in_turn(
        narrow,
        {"now": {"max_tokens": 1500, "priority": -9}, "later": {"priority": 5}, "usual": {}, "soon": {"priority": -5}},
    )
    assert order == ["now", "soon", "usual", "later"]


def test_a_priority_that_is_no_number_is_named(shared: WorkerProcess) -> None:
    answer = shared.client.post("/v1/completions", json={"prompt": "x", "priority": "high"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "priority"
