"""Router headers of a request (salt, tenant, priority, deadline, usage), and the queue limit."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.worker.api.process import WorkerProcess, until

from fairlead_index.salts import cache_salt


def cached(worker: WorkerProcess, prompt: str, salt: str = "", **fields: Any) -> int:
    headers = {"X-Fairlead-Cache-Salt": salt} if salt else {}
    answer = worker.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == int(answer.headers["x-fairlead-cached-tokens"])
    return int(answer.headers["x-fairlead-cached-tokens"])


def test_prompts_of_different_salts_share_no_kv(shared: WorkerProcess) -> None:
    prompt = "a secret of one tenant, long enough for a page or more of it, told twice to be sure. " * 3
    anna, boris = cache_salt(b"secret", "anna"), cache_salt(b"secret", "boris")
    assert cached(shared, prompt, anna) == 0
    assert cached(shared, prompt, boris) == 0, "another tenant sees nothing of it"
    assert cached(shared, prompt) == 0, "nor does a request without a salt"
    assert cached(shared, prompt, cache_salt=anna) == 0, "nor one with the salt in its body: that is salted again"
    assert cached(shared, prompt, cache_salt="mine") == 0
    assert all(cached(shared, prompt, *one[:1], **one[1]) > 0 for one in ((anna, {}), (boris, {}), ("", {}), ("", {"cache_salt": "mine"})))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Fairlead-Cache-Salt", "no hex"),
        ("X-Fairlead-Priority", "high"),
    ],
)
def test_headers_that_make_no_sense_are_refused(shared: WorkerProcess, name: str, value: str) -> None:
    answer = shared.client.post("/v1/completions", json={"prompt": "x"}, headers={name: value})
    assert answer.status_code == 400 and name in answer.json()["error"]["message"]


def test_usage_is_in_a_header_or_if_requested_in_a_comment_before_the_end(shared: WorkerProcess) -> None:
    body = {"prompt": "one two three", "max_tokens": 7, "ignore_eos": True}
    whole = shared.client.post("/v1/completions", json=body)
    usage = whole.json()["usage"]
    told = f"{usage['prompt_tokens']} {usage['completion_tokens']}"
    assert usage["completion_tokens"] == 7 and whole.headers["x-fairlead-usage"] == told
    stream = shared.client.post("/v1/completions", json=body | {"stream": True}, headers={"X-Fairlead-Usage": "1"}).text
    assert stream.endswith(f"\n\n: usage {told}\n\ndata: [DONE]\n\n")
    assert ": usage" not in shared.client.post("/v1/completions", json=body | {"stream": True}).text


def test_a_full_queue_answers_429_with_the_time_to_wait(narrow: WorkerProcess) -> None:
    worker, body = narrow, {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(worker.client.post, "/v1/completions", json=body)]
        until(lambda: worker.metric("fairlead_num_requests_running") == 1, "one running")
        asked += [pool.submit(worker.client.post, "/v1/completions", json=body | {"max_tokens": 1}) for _ in range(3)]
        until(lambda: worker.metric("fairlead_num_requests_waiting") == 3, "three waiting")
        refused = worker.client.post("/v1/completions", json=body)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1 and refused.headers["x-fairlead-retry"] == "other"
        assert worker.client.post("/tokenize", json={"prompt": "x"}).status_code == 200, "what needs no engine goes on"
        of_b = {"x-fairlead-tenant": "b"}
        others = pool.submit(worker.client.post, "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=of_b)
        until(lambda: worker.metric("fairlead_num_requests_waiting") == 4, "another tenant's first request waits too")
        again = worker.client.post("/v1/completions", json={"prompt": ["x"] * 2}, headers=of_b)
        assert again.status_code == 429, "beyond its share of the limit"
        assert others.result().status_code == 200
        assert [one.result().status_code for one in asked] == [200] * 4
    assert worker.client.post("/v1/completions", json={"prompt": "x", "n": 5, "max_tokens": 1}).status_code == 200, "alone, any number"
