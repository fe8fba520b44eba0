"""Templates that do not render tools get a second form that does, in the format that the parser `hermes` reads."""

import re
from typing import Any

import pytest

from fairlead_common.prompts.messages import ChatRenderer
from fairlead_worker.parsing.families import select_parsers
from fairlead_worker.parsing.tool_template import build_tool_template

TEXT = "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
PARTS = "{% for message in messages %}[{{ message.role }}]{% for p in message.content %}{{ p.text }}{% endfor %}{{ '\\n' }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "now"}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "The time?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
]


def render(source: str, messages: list[dict[str, Any]], tools: Any = TOOLS) -> str:
    return ChatRenderer(build_tool_template(source), {}).render(messages, tools, False, False, {})


@pytest.mark.parametrize("source", [TEXT, PARTS], ids=["text", "parts"])
def test_tools_calls_and_results_are_text_of_their_messages(source: str) -> None:
    text = render(source, TALK)
    assert text.startswith("[user]You may call these functions:\n<tools>\n" + '{"type": "function", "function": {"name": "now"}}\n</tools>')
    assert text.endswith(
        'The time?\n[assistant]<tool_call>\n{"name": "now", "arguments": {"zone": "CET"}}\n</tool_call>\n'
        "[user]<tool_response>\nnoon\n</tool_response>\n"
    )
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in TALK[:1]]
    assert render(source, parts) == render(source, TALK[:1])


def test_a_system_message_keeps_its_place() -> None:
    text = render(TEXT, [{"role": "system", "content": "Be brief."}, *TALK[:1]])
    assert text.startswith("[system]Be brief.\n\nYou may call") and text.endswith("</tool_call>\n[user]The time?\n")


@pytest.mark.parametrize("source", [TEXT, PARTS], ids=["text", "parts"])
def test_results_and_the_next_question_are_one_user_message(source: str) -> None:
    talk = [*TALK, {"role": "tool", "tool_call_id": "c2", "content": "one"}, {"role": "user", "content": "So?"}, *TALK[1:]]
    after = render(source, talk).rpartition("The time?\n")[2]
    roles = re.findall(r"\[(\w+)\]", after)
    assert roles == ["assistant", "user", "assistant", "user"]
    results = "<tool_response>\nnoon\n</tool_response>\n<tool_response>\none\n</tool_response>\nSo?\n"
    assert f"[user]{results}[assistant]" in after and after.endswith("[user]<tool_response>\nnoon\n</tool_response>\n")


def test_a_template_that_renders_calls_without_tools_shows_each_call_once() -> None:
    calls = "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}"
    assert render(calls + "{{ m.content }}{% endfor %}", TALK).count("CET") == 1


def test_without_tools_nothing_changes() -> None:
    assert render(TEXT, TALK[:1], None) == ChatRenderer(TEXT, {}).render(TALK[:1], None, False, False, {})


@pytest.mark.parametrize("source", ["", "{% if tools %}{{ tools | tojson }}{% endif %}" + TEXT])
def test_a_template_that_renders_tools_is_left_alone(source: str) -> None:
    assert build_tool_template(source) == ""


def test_its_parser_reads_the_calls() -> None:
    assert select_parsers("auto", "auto", (TEXT, build_tool_template(TEXT)))[0].tool_parser == "hermes"
