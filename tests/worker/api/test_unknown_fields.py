"""Unknown request fields are ignored, and a header and one log line name them."""

import re

from tests.worker.api.process import WorkerProcess

from fairlead_worker.api.schema import MAX_FIELDS

BODY = {"prompt": "one two", "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def logged(worker: WorkerProcess, name: str) -> int:
    return len(re.findall(rf"ignored unknown request fields.*\b{name}\b", worker.log.read_text()))


def test_a_header_names_unknown_fields_and_the_log_names_each_once(shared: WorkerProcess) -> None:
    plain = shared.post("/v1/completions", **BODY)
    assert "x-fairlead-warning" not in plain.headers
    for _ in range(2):
        answer = shared.post("/v1/completions", **BODY, foo_bar=1, another=2)
        assert answer.headers["x-fairlead-warning"] == "ignored unknown fields: another, foo_bar"
        assert answer.json()["choices"] == plain.json()["choices"]
    assert logged(shared, "foo_bar") == logged(shared, "another") == 1
    with shared.stream("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=1, foo_bar=1) as (reply, events):
        assert reply.headers["x-fairlead-warning"] == "ignored unknown fields: foo_bar"
        assert list(events)[-1] == "[DONE]"
    assert shared.post("/v1/messages", foo_bar=1).headers["x-fairlead-warning"] == "ignored unknown fields: foo_bar", "errors too"


def test_a_name_cannot_forge_a_header_or_a_log_line(shared: WorkerProcess) -> None:
    names = {"a\r\nset-cookie: b": 1, "x" * 65: 1, "ring\u00e9": 1} | {f"many_{number:03}": 1 for number in range(500)}
    answer = shared.post("/v1/completions", **BODY, **names)
    shown = answer.headers["x-fairlead-warning"].removeprefix("ignored unknown fields: ").split(", ")
    assert shown == [f"many_{number:03}" for number in range(10)]
    assert "set-cookie" not in answer.headers and logged(shared, "many_499") == 0


def test_a_body_of_thousands_of_fields_is_refused(shared: WorkerProcess) -> None:
    refused = shared.client.post("/v1/completions", json={"prompt": "x", **{f"u{number}": 0 for number in range(MAX_FIELDS)}})
    assert refused.status_code == 400 and f"at most {MAX_FIELDS}" in refused.json()["error"]["message"]
