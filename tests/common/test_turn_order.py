"""The turns that agents' programs send render with every template that renders a plain conversation, without loss."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.common.chat_templates import OWN, REAL
from tests.common.test_conversations import (
    ABSENT,
    ANSWERED,
    ASKED,
    NEXT,
    TOOLS,
    Message,
    encoder_for,
    in_transformers,
    render,
    serves,
    talk,
)

from fairlead_common.prompts import turn_order
from fairlead_common.prompts.encoder import PromptEncoder, PromptError
from fairlead_common.prompts.turn_order import TurnOrder, arrange

STRICT = """\
{%- if messages[0].role == 'system' %}{{ '[S]' + messages[0].content }}{% set messages = messages[1:] %}{% endif -%}
{%- for message in messages -%}
{%- if message.role not in ('user', 'assistant') or (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate') }}
{%- endif -%}
{{ '[' + message.role + ']' + message.content }}
{%- endfor -%}
"""
"""Of the kind of Mistral's and Gemma's."""
TOLD, LATER, AGAIN = (
    {"role": "system", "content": "Rules"},
    {"role": "system", "content": "Agents"},
    {"role": "user", "content": "Again"},
)
ORDERS: list[list[Message]] = [
    [TOLD, ASKED],
    [TOLD, ASKED, LATER],
    [TOLD, ASKED, NEXT],
    [TOLD, ASKED, NEXT, LATER, AGAIN],
    [TOLD, LATER, ASKED, ANSWERED, NEXT],
    [TOLD, ASKED, ANSWERED, LATER, NEXT],
    [ASKED, ANSWERED, {"role": "assistant", "content": "More"}, NEXT],
]
"""Claude Code sends the second, Codex the third."""


def sources() -> Iterator[Any]:
    for name, source in (OWN | {"strict": STRICT}).items():
        yield pytest.param(source, id=name)
    for path in REAL:
        yield pytest.param(path, id=path.stem[-60:])


@pytest.fixture(params=sources(), scope="module")
def encoder(request: pytest.FixtureRequest) -> PromptEncoder:
    source = request.param.read_text(encoding="utf-8") if isinstance(request.param, Path) else request.param
    try:
        return encoder_for(source)
    except PromptError as error:
        pytest.skip(str(error))


def test_no_order_of_turns_is_refused_or_lost(encoder: PromptEncoder) -> None:
    if not serves(encoder, None):
        return
    for messages in ORDERS:
        output = render(encoder, messages)
        assert not [each["content"] for each in messages if each["content"] not in output], (messages, output)


def test_a_template_that_renders_all_orders_gets_them_unchanged(encoder: PromptEncoder) -> None:
    if not serves(encoder, None):
        return
    expected = [in_transformers(encoder.format.chat_template, messages) or "" for messages in ORDERS]
    if all(each["content"] in output for output, messages in zip(expected, ORDERS, strict=True) for each in messages):
        assert [render(encoder, messages) for messages in ORDERS] == expected


def test_a_question_beside_a_result_is_kept(encoder: PromptEncoder) -> None:
    if not serves(encoder, TOOLS):
        return
    until_result = talk(content=ABSENT)[:3]
    try:
        render(encoder, until_result, TOOLS)
    except PromptError:
        return  # the template has no results
    for others in ([NEXT], [LATER], [NEXT, LATER]):
        output = render(encoder, [*until_result, *others], TOOLS)
        assert not [each["content"] for each in others if each["content"] not in output], output


MESSAGES = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "assistant", "tool"]),
        st.sampled_from(["a", "b"]) | st.just([{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]),
    ),
    min_size=1,
)


@given(messages=MESSAGES, order=st.builds(TurnOrder, *[st.booleans()] * 4), style=st.sampled_from(["text", "one part", "parts", "both"]))
def test_arranged_messages_have_all_texts_in_order(messages: list[Message], order: TurnOrder, style: Any) -> None:
    def texts(each: list[Message]) -> str:
        contents = [message["content"] for message in each]
        return "".join(c if isinstance(c, str) else "".join(part["text"] for part in c) for c in contents).replace("\n", "")

    arranged = arrange(messages, order, dict.fromkeys(("system", "user", "assistant", "tool"), style))
    roles = [each["role"] for each in arranged]
    assert texts(arranged) == texts(messages)
    assert order.system or roles[0] != "system"
    assert order.later_system or "system" not in roles[1:]
    pairs = set(pairwise(roles))
    assert order.repeated or not pairs & {("user", "user"), ("assistant", "assistant")}
    assert order.question_after_result or ("tool", "user") not in pairs


STYLES: Any = dict.fromkeys(("system", "user", "assistant", "tool"), "text")


def test_joined_answers_keep_the_reasoning_of_each() -> None:
    answers = [{"role": "assistant", "content": each, "reasoning_content": f"why {each}"} for each in ("a", "b")]
    joined = {"role": "assistant", "content": "a\nb", "reasoning_content": "why a\nwhy b"}
    assert arrange(answers, TurnOrder(repeated=False), STYLES) == [joined]


def test_many_messages_in_a_row_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Any] = []
    style = turn_order.text_in_style

    def count(text: str, *args: Any) -> Any:
        joined.append(text)
        return style(text, *args)

    monkeypatch.setattr(turn_order, "text_in_style", count)
    arranged = arrange([{"role": "user", "content": "a"}] * 100, TurnOrder(repeated=False), STYLES)
    assert joined == [arranged[0]["content"]] == ["\n".join("a" * 100)]
