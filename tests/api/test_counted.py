"""/v1/messages/count_tokens accepts and refuses the same bodies as /v1/messages, in worker and router."""

import json
import random
from typing import Any

import httpx
import pytest
from tests.api.bodies import HI, Bodies
from tests.api.fleet import Pair

from fairlead_common.protocols.paths import COUNT_TOKENS, MESSAGES

TOOL = {"name": "f", "input_schema": {"type": "object"}}
CONTEXT = "context"
"""Words of the one refusal that count_tokens does not share: it must count prompts of any length."""


def refusal(url: str, path: str, content: bytes) -> tuple[int, str]:
    """Return the status and the error's text."""
    answer = httpx.post(url + path, content=content, timeout=60)
    return answer.status_code, answer.json()["error"]["message"] if answer.status_code >= 400 else ""


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 200),
        ({"stop_sequences": ["end"], "tools": [TOOL], "tool_choice": {"type": "auto"}, "logit_bias": {"5": 1}, "bad_words": ["x"]}, 200),
        ({"stop_sequences": [""]}, 400),
        ({"stop_sequences": ["x"] * 17}, 400),
        ({"tool_choice": {"type": "any"}}, 400),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, 400),
        ({"tools": [TOOL, TOOL]}, 400),
        ({"tools": [TOOL | {"name": "a b"}]}, 400),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}, "output_config": {"format": {"type": "json_schema", "schema": {}}}}, 400),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no-such-type"}}}}, 400),
        ({"logit_bias": {"1024": 1}}, 400),
        ({"allowed_token_ids": []}, 400),
        ({"bad_words": [" "] * 2, "min_tokens": 9}, 400),
        ({"chat_template_kwargs": {"chat_template": "x"}}, 400),
        ({"model": "another"}, 404),
    ],
)
def test_count_tokens_refuses_what_messages_refuses(pair: Pair, fields: dict[str, Any], status: int) -> None:
    content = json.dumps({"messages": HI, "max_tokens": 2} | fields).encode()
    for url in pair.urls:
        told = refusal(url, MESSAGES, content)
        counted = refusal(url, COUNT_TOKENS, content)
        assert told[0] == counted[0] == status, (told, counted)
        assert told == counted or url != pair.worker.url, "in the same words, except for the router's own"


def test_count_tokens_agrees_with_messages_for_any_body(pair: Pair) -> None:
    bodies = Bodies(pair.worker.client.get("/openapi.json").json(), random.Random(8))
    schema = dict(bodies.operations)[MESSAGES]
    seen = set()
    for number in range(100):
        content = bodies.encoded(bodies.body(MESSAGES, schema))
        url = pair.urls[number % 2]
        told, counted = refusal(url, MESSAGES, content), refusal(url, COUNT_TOKENS, content)
        if CONTEXT not in told[1] and "max_tokens: is missing" not in told[1]:
            # A router looks for the model of messages before it looks at the other fields. It only forwards what is to be counted.
            same = counted[0] == told[0] or (url == pair.urls[1] and (told[0], counted[0]) == (404, 400))
            assert same, (told, counted, content[:2000])
            seen.add(told[0])
    assert seen >= {200, 400}
