"""No log contains prompts or answers, at any log level."""

import json
import os
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.worker.api.process import WorkerProcess, until

from fairlead_common.prompts.encoder import PromptEncoder, PromptFormat

SECRET = "xyzzy"
EVERYTHING = """
import logging
plain = logging.basicConfig
logging.basicConfig = lambda **given: plain(**given | {"level": logging.DEBUG})
"""
"""`--log-level DEBUG` leaves the loggers of libraries at INFO."""


def test_no_log_has_a_prompt_an_answer_or_a_key_even_at_debug(
    start: Callable[..., WorkerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(EVERYTHING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    worker = start("--log-level", "DEBUG").wait_ready()
    encoder = PromptEncoder(msgspec.json.decode(worker.client.get("/internal/prompt-format").content, type=PromptFormat), None)
    prompt = f"{SECRET} one two three " * 5
    keys = {"authorization": f"Bearer {SECRET}-key", "x-api-key": f"{SECRET}-key", "x-request-id": f"forged\t{SECRET}"}
    tools = [{"type": "function", "function": {"name": "look", "description": SECRET, "parameters": {"type": "object"}}}]
    fields: list[dict] = [
        {},
        {"stream": True, "user": SECRET, "cache_salt": SECRET},
        {"n": 2, "stop": [SECRET], "logprobs": 2},
        {"temperature": SECRET},
        {"stop": [[SECRET]]},
        {"max_tokens": 10**6},
        {f"{SECRET}\nline": 1, "extra": SECRET},
    ]
    asked = {"max_tokens": 4}
    for path, said in (("completions", {"prompt": prompt}), ("chat/completions", {"messages": [{"role": "user", "content": prompt}]})):
        for more in fields:
            worker.client.post(f"/v1/{path}?{SECRET}", json=said | asked | more, headers=keys)
        worker.client.post(f"/v1/{path}", content=json.dumps(said)[:-3], headers=keys)
    worker.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": prompt}], "tools": tools} | asked)
    worker.client.post("/v1/completions", json={"prompt": [7, 11, 999_999_937]}, headers=keys)
    worker.client.post("/tokenize", json={"prompt": prompt})
    worker.client.get(f"/{SECRET}", headers=keys)
    tokens = encoder.encode_text(prompt)
    worker.client.post(
        "/v1/completions",
        content=tokens.tobytes() + json.dumps({"prompt": prompt} | asked).encode(),
        headers={"x-fairlead-prompt-tokens": str(len(tokens))},
    )
    answer = worker.complete(prompt=prompt, max_tokens=12, temperature=0)["choices"][0]["text"]
    with worker.stream("/v1/completions", prompt=prompt, max_tokens=400, ignore_eos=True) as (_, events):
        next(events)  # and disconnect
    until(lambda: worker.load()["running"] == 0, "its request has ended")
    with worker.stream("/v1/completions", prompt=prompt, max_tokens=500, ignore_eos=True) as (_, events):
        next(events)
        os.kill(worker.engine_pid, 9)
        list(events)
    worker.process.wait(60)
    log = worker.log.read_text()
    assert " DEBUG " in log and "finished {" in log, "it was logged at that level, and requests have their line"
    told = log + worker.termination_log.read_text()
    listed = str(array("I", tokens).tolist()[:4])[1:-1]
    for confidential in (SECRET, "one two three", "999999937", listed, listed.replace(" ", ""), answer.strip()):
        assert confidential and confidential not in told, confidential
