"""A list of many prompts: another client's request does not wait for all of them, and each of them is answered."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.worker.api.process import WorkerProcess, until

from fairlead_worker.api.engine.generation import MAX_WAITING_TOKENS
from fairlead_worker.api.openai.completions import MAX_SEQUENCES

COUNT, LENGTH = 200, 1000
assert COUNT <= MAX_SEQUENCES and COUNT * LENGTH > 4 * MAX_WAITING_TOKENS


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [[(number * 7 + place) % 200 + 10 for place in range(LENGTH)] for number in range(COUNT)]


def test_a_request_beside_a_list_of_prompts_is_answered_before_its_end(shared: WorkerProcess, prompts: list[list[int]]) -> None:
    def ask_all() -> dict[str, object]:
        return shared.client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 2, "ignore_eos": True}).json()

    with ThreadPoolExecutor(1) as pool:
        listed = pool.submit(ask_all)
        until(lambda: shared.metric("fairlead_num_requests_waiting") > COUNT / 2, "those that are not sent yet count as waiting")
        assert shared.post("/v1/completions", prompt="short", max_tokens=1).status_code == 200
        assert not listed.done() and shared.metric("fairlead_num_requests_waiting") > COUNT / 4
        answer = listed.result()
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": COUNT * LENGTH, "completion_tokens": 2 * COUNT}
    assert [choice["index"] for choice in answer["choices"]] == list(range(COUNT))
    until(lambda: shared.metric("fairlead_num_requests_waiting") == 0, "nothing is left")


def test_a_list_whose_client_leaves_is_forgotten(shared: WorkerProcess, prompts: list[list[int]]) -> None:
    body = {"prompt": prompts, "max_tokens": 2, "ignore_eos": True, "stream": True}
    with shared.client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_bytes())
    until(lambda: shared.metric("fairlead_num_requests_waiting") == shared.metric("fairlead_num_requests_running") == 0, "it has left")
