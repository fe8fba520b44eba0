"""A large answer is encoded in small parts, because the event loop waits for the interpreter's lock while one is encoded."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from fairlead_common.protocols.answer import Answer
from fairlead_worker.api.replies import _encode_parts

SCORES = [None, *({str(token): {"logprob": -1.5, "rank": token, "decoded_token": "é"} for token in range(20)} for _ in range(50))]


class Token(Answer):
    token: str
    top_logprobs: list[dict[str, Any]]


class Logprobs(Answer):
    content: list[Token]
    refusal: None = None


class Choice(Answer, tag_field="type", tag="choice"):
    prompt_logprobs: list[Any]
    logprobs: Logprobs
    token_ids: list[int]
    stop_reason: str | UnsetType = UNSET


class Document(Answer):
    choices: list[Choice]
    prompt_logprobs: list[Any] | UnsetType = UNSET


def test_each_position_is_a_part_and_the_answer_stays_the_same() -> None:
    content = [Token("a", [{"token": "b", "logprob": -9999.0}] * 20) for _ in range(50)]
    choice = Choice(SCORES, Logprobs(content), [1, 2])
    for document in (Document([choice, choice]), Document([], SCORES)):
        assert msgspec.json.encode(_encode_parts(document)) == msgspec.json.encode(document)
    assert all(isinstance(each, msgspec.Raw) for each in _encode_parts(Document([], SCORES))["prompt_logprobs"])
    parts = _encode_parts(choice, 3)
    assert all(isinstance(each, msgspec.Raw) for each in [*parts["prompt_logprobs"], *parts["logprobs"]["content"]])
