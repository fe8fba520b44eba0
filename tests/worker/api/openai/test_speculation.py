"""A worker with speculation gives the same answers as one without, streamed or whole, and reports its drafts."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.worker.api.process import WorkerProcess

ASKED: list[dict[str, Any]] = [
    {"temperature": 0, "logit_bias": {"40": 60, "41": 60, "42": 60}},
    {"temperature": 0.8, "seed": 5, "n": 2, "allowed_token_ids": [40, 41, 42], "logprobs": 2},
    {"temperature": 1.0, "seed": 6, "allowed_token_ids": [50, 51], "frequency_penalty": 0.1, "min_tokens": 30, "stop_token_ids": [50]},
    {"temperature": 0.9, "seed": 7},
]


def asked(worker: WorkerProcess, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    return worker.complete(prompt="Again and again and again", max_tokens=60, ignore_eos=True, **body, **more)


def same(worker: WorkerProcess, plain: WorkerProcess) -> None:
    for body in ASKED:
        answer, expected = asked(worker, body), asked(plain, body)
        assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in expected["choices"]]
        assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
        for choice, other in zip(answer["choices"], expected["choices"], strict=True):
            assert (choice["finish_reason"], bool(choice["logprobs"])) == (other["finish_reason"], bool(other["logprobs"]))
            if choice["logprobs"]:
                assert choice["logprobs"]["tokens"] == other["logprobs"]["tokens"]
                assert choice["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-3)


def test_a_look_up_changes_no_answer(start: Callable[..., WorkerProcess], shared: WorkerProcess) -> None:
    flags = ("--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4}')
    worker = start(*flags).wait_ready()
    same(worker, shared)
    text = asked(shared, ASKED[0])["choices"][0]["text"]
    stop = text[7:10]
    ended = asked(worker, ASKED[0], stop=stop)["choices"][0]
    assert ended == asked(shared, ASKED[0], stop=stop)["choices"][0]
    assert (ended["text"], ended["finish_reason"]) == (text[: text.index(stop)], "stop")
    with worker.stream("/v1/completions", prompt="Again and again and again", max_tokens=60, ignore_eos=True, **ASKED[0]) as (_, events):
        pieces = [event["choices"][0]["text"] for event in events if isinstance(event, dict) and event["choices"]]
    assert "".join(pieces) == text
    drafts, guessed, right = (
        worker.metric(f"fairlead_spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < drafts < guessed and 0 < right < guessed
    at = re.findall(r'spec_decode_num_accepted_tokens_per_pos_total{.*position="(\d)"} (\S+)', worker.client.get("/metrics").text)
    assert [position for position, _ in at] == ["0", "1", "2", "3"]
    assert sum(float(count) for _, count in at) == right
    assert "spec_decode" not in shared.client.get("/metrics").text


def test_a_draft_model_changes_no_answer(start: Callable[..., WorkerProcess], shared: WorkerProcess, model: Path) -> None:
    worker = start("--speculative-config", json.dumps({"model": f"file://{model}"})).wait_ready()
    assert asked(worker, {"temperature": 0})["choices"] == asked(shared, {"temperature": 0})["choices"]
    same(worker, shared)
    assert worker.metric("fairlead_spec_decode_num_accepted_tokens_total") > 0
