"""Turns are arranged as a template wants them, without loss. `test_conversations` renders them with every template."""

import re
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.common.talks import Message

from fairlead_common.prompts import turn_order
from fairlead_common.prompts.turn_order import Fillers, TurnOrder, arrange

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGES = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(ROLES),
        st.sampled_from(["a", "b"]) | st.just([{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]),
    ),
    min_size=1,
)


ANY_FLAGS = st.builds(TurnOrder, *[st.booleans()] * len(fields(TurnOrder)))


@given(messages=MESSAGES, order=ANY_FLAGS, style=st.sampled_from(["text", "one part", "parts", "both"]))
def test_arranged_messages_have_all_texts_in_order(messages: list[Message], order: TurnOrder, style: Any) -> None:
    def texts(each: list[Message]) -> str:
        contents = [message["content"] for message in each]
        joined = "".join(c if isinstance(c, str) else "".join(part["text"] for part in c) for c in contents)
        return re.sub(r"\n|</?tool_response>", "", joined)

    arranged = arrange(messages, order, Fillers(dict.fromkeys(ROLES, style)))
    roles = [each["role"] for each in arranged]
    assert texts(arranged) == texts(messages)
    assert order.system or roles[0] != "system"
    assert order.no_question or "user" in roles
    assert order.results or "tool" not in roles
    assert order.later_system or "system" not in roles[1:]
    pairs = set(pairwise(roles))
    assert order.repeated or not pairs & {("user", "user"), ("assistant", "assistant")}
    assert order.question_after_result or ("tool", "user") not in pairs


FILLERS = Fillers(dict.fromkeys(ROLES, "text"))


def test_joined_answers_keep_the_reasoning_of_each() -> None:
    answers = [{"role": "assistant", "content": each, "reasoning_content": f"why {each}"} for each in ("a", "b")]
    joined = {"role": "assistant", "content": "a\nb", "reasoning_content": "why a\nwhy b"}
    assert arrange(answers, TurnOrder(repeated=False), FILLERS) == [joined]


def test_many_messages_in_a_row_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Any] = []
    style = turn_order.text_in_style

    def count(text: str, *args: Any) -> Any:
        joined.append(text)
        return style(text, *args)

    monkeypatch.setattr(turn_order, "text_in_style", count)
    arranged = arrange([{"role": "user", "content": "a"}] * 100, TurnOrder(repeated=False), FILLERS)
    assert joined == [arranged[0]["content"]] == ["\n".join("a" * 100)]
