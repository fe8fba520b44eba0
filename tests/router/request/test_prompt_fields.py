"""Fields that change a prompt: either the router's tokens equal the worker's, or the text is forwarded unchanged."""

from typing import Any

import msgspec
import pytest
from tests.router.harness import Fleet
from tests.router.prompt_format import make_format
from tokenizers import Tokenizer, processors

from fairlead_common.prompts.encoder import PromptEncoder, PromptFormat, digest


def format_with_bos() -> PromptFormat:
    """Return a format whose tokenizer puts a BOS token before every text."""
    format = make_format()
    tokenizer = Tokenizer.from_str(format.tokenizer_json)
    tokenizer.add_special_tokens(["<begin>"])
    begin = ("<begin>", tokenizer.token_to_id("<begin>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[begin])
    text = tokenizer.to_str()
    return msgspec.structs.replace(format, tokenizer_json=text, tokenizer_digest=digest(text))


PROMPT, CHAT = {"prompt": "hello"}, {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("path", "fields", "tokenized"),
    [
        ("/v1/completions", PROMPT, True),
        ("/v1/completions", PROMPT | {"add_special_tokens": True}, True),
        ("/v1/completions", PROMPT | {"add_special_tokens": False}, True),
        ("/v1/completions", PROMPT | {"truncate_prompt_tokens": 2}, False),
        ("/v1/completions", PROMPT | {"suffix": ""}, True),
        ("/v1/completions", PROMPT | {"echo": True, "return_token_ids": True, "bad_words": ["x"]}, True),
        ("/v1/chat/completions", CHAT, True),
        ("/v1/chat/completions", CHAT | {"add_special_tokens": True}, True),
        ("/v1/chat/completions", CHAT | {"add_special_tokens": False, "echo": True}, True),
        ("/v1/chat/completions", CHAT | {"truncate_prompt_tokens": -1}, False),
        ("/v1/chat/completions", CHAT | {"chat_template": "x"}, False),
        ("/v1/chat/completions", CHAT | {"documents": []}, False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
async def test_tokens_equal_the_workers_or_are_not_sent(fleet: Fleet, path: str, fields: dict[str, Any], tokenized: bool) -> None:
    format = format_with_bos()
    worker = await fleet.worker(format=format)
    router = await fleet.router(worker)
    assert (await router.client.post(path, json=fields | {"model": "stand-in"})).status_code == 200
    (received,) = worker.received
    assert {name: received.json[name] for name in fields} == fields, "the body is unchanged"
    special = fields.get("add_special_tokens")
    encoder = PromptEncoder(format)
    if path == "/v1/completions":
        expected = encoder.encode_text(fields["prompt"], special is not False)
    else:
        expected = encoder.encode_chat(fields["messages"], add_special_tokens=special is True)
    assert received.tokens == (expected.tolist() if tokenized else None)


async def test_a_prompt_that_is_certainly_too_long_is_refused_before_it_is_tokenized(fleet: Fleet) -> None:
    """Another engine than Fairlead's may shorten it."""
    format = msgspec.structs.replace(make_format(), max_model_len=100)
    worker = await fleet.worker(format=format)
    router = await fleet.router(worker)
    (answer, refused) = [
        await router.client.post("/v1/completions", json={"prompt": "x" * length, "model": "stand-in"}) for length in (100, 101)
    ]
    assert answer.status_code == 200 and worker.received[0].tokens is not None
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    assert error["message"].startswith("This model's maximum context length is 100 tokens. However, ") and len(worker.received) == 1
    cut = await router.client.post("/v1/completions", json={"prompt": "x" * 101, "model": "stand-in", "truncate_prompt_tokens": 50})
    router.server.router.table.last_runtime = "sglang"
    other = await router.client.post("/v1/completions", json={"prompt": "x" * 101, "model": "stand-in"})
    assert {cut.status_code, other.status_code} == {200}
    assert [received.tokens for received in worker.received[1:]] == [None, None]
