"""Conversations with each kind of message, and their renderings by Fairlead and by transformers."""

import json
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import pytest
from tests.common.chat_templates import OWN, REAL, STRICT
from tokenizers import Tokenizer, models
from transformers.utils.chat_template_utils import render_jinja_template

from fairlead_common.prompts.encoder import PromptEncoder, PromptError, PromptFormat
from fairlead_worker.parsing.tool_template import build_tool_template

Message = dict[str, Any]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TOOLS = [{"type": "function", "function": {"name": "forecast", "description": "d", "parameters": {"type": "object", "properties": {}}}}]
ABSENT = object()
ASKED, ANSWERED, NEXT = ({"role": role, "content": text} for role, text in (("user", "Ask"), ("assistant", "Said"), ("user", "Then")))
PLAIN = [ASKED, ANSWERED, NEXT]
AS_PARTS = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in PLAIN]
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


DEVELOPED, LATE = ({"role": "developer", "content": text} for text in ("Devel", "Late"))
MORE = {"role": "assistant", "content": "More"}


def calling(*calls: Message, **said: Any) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **said}


def call(arguments: Any = '{"h": "Harb"}', id: str = "abcdefg12", name: str = "tide") -> Message:
    return {"id": id, "type": "function", "function": {"name": name} | ({} if arguments is ABSENT else {"arguments": arguments})}


TIDE, WIND = calling(call()), calling(call(id="abcdefg13", name="wind"))
HIGH, CALM = ({"role": "tool", "tool_call_id": id, "content": text} for id, text in (("abcdefg12", "High"), ("abcdefg13", "Calm")))
HISTORIES: dict[str, list[Message]] = {
    "text, call": [ASKED, ANSWERED, TIDE, HIGH],
    "text, call, answer": [ASKED, ANSWERED, TIDE, HIGH, MORE, NEXT],
    "text, text, call": [ASKED, ANSWERED, MORE, TIDE, HIGH],
    "call, text": [ASKED, TIDE, ANSWERED, HIGH, MORE, NEXT],
    "call, call": [ASKED, TIDE, WIND, HIGH, CALM],
    "call, call, answer": [ASKED, TIDE, WIND, CALM, HIGH, MORE, NEXT],
    "thoughts, calls": [ASKED, {**TIDE, "reasoning_content": "Hm"}, {**WIND, "reasoning_content": "Ho"}, HIGH, CALM],
    "developer later": [TOLD, DEVELOPED, ASKED],
    "developer again": [DEVELOPED, ASKED, ANSWERED, LATE, NEXT],
    "developer last": [ASKED, DEVELOPED],
    "developer, system": [DEVELOPED, TOLD, ASKED],
    "answer first": [ANSWERED, ASKED],
    "answer first in parts": [{**ANSWERED, "content": [{"type": "text", "text": "Said"}]}, *AS_PARTS[:1]],
    "result first": [HIGH, ANSWERED, ASKED],
    "result first in parts": [{**HIGH, "content": [{"type": "text", "text": "High"}]}, *AS_PARTS[:1]],
    "result after system": [TOLD, HIGH, ANSWERED, ASKED],
    "call first": [TIDE, HIGH, ANSWERED, ASKED],
    "no question": [TIDE, HIGH],
    "only a result": [HIGH],
    "only an answer": [TOLD, ANSWERED],
    "system": [TOLD],
    "two systems": [TOLD, LATER],
    "developer": [DEVELOPED],
    "no result": [ASKED, TIDE, NEXT],
    "one of two results": [ASKED, calling(call(), call(id="abcdefg13", name="wind")), HIGH, NEXT],
    "answer for result": [ASKED, TIDE, ANSWERED, NEXT],
    "late result": [ASKED, TIDE, NEXT, HIGH, MORE, AGAIN],
    "result without call": [ASKED, ANSWERED, HIGH, NEXT],
    "system before result": [TOLD, ASKED, TIDE, LATER, HIGH, MORE, NEXT],
}
TEXTS = ("Rules", "Agents", "Devel", "Late", "Ask", "Said", "More", "Then", "Again", "High", "Calm", "tide", "wind", "Harb")

EMPTY_ARGUMENTS = (ABSENT, None, "", "  ", "null", '""', "{}", {})
BROKEN_ARGUMENTS = (
    '{"h": "Harb',
    '{"h": ["Harb',
    '{"h": "Harb"} trailing',
    "Harb",
    '["Harb"]',
    '"Harb"',
    '{"h": "Harb", "b": tr',
    '"{\\"h\\": \\"Harb',
)
SIGNS = ("'type'", "'text'", "[{'", "'h':", "['", "None", "Undefined")
"""Signs of Python's writing of the values in these conversations."""


def talk(arguments: Any = '{"h": "Harb"}', result: Any = "High", id: str = "abcdefg12", **said: Any) -> list[Message]:
    """Return a conversation with a call. `said`: fields of its message; ABSENT leaves one out."""
    message = {"role": "assistant", "content": None, "tool_calls": [call(arguments, id)], **said}
    message = {key: value for key, value in message.items() if value is not ABSENT}
    return [ASKED, message, {"role": "tool", "tool_call_id": id, "content": result}, ANSWERED, NEXT]


def parts(text: str) -> list[Message]:
    return [{"type": "text", "text": text}]


def in_transformers(source: str, messages: list[Message], tools: Any = None) -> str | None:
    """Return transformers' rendering, or None if the template refuses the messages."""
    try:
        return render_jinja_template([messages], tools=tools, chat_template=source, add_generation_prompt=True, **SPECIAL)[0][0]
    except Exception:  # a template raises anything
        return None


def encoder_for(source: str) -> PromptEncoder:
    """Return the encoder that router and worker have for a model with this template."""
    return PromptEncoder(
        PromptFormat(
            tokenizer_json=Tokenizer(models.BPE()).to_str(),
            tokenizer_digest="t",
            model_digest="m",
            model_names=["m"],
            block_tokens=16,
            max_model_len=64,
            chat_template=source,
            tool_template=build_tool_template(source),
            special_tokens=SPECIAL,
        )
    )


def render(encoder: PromptEncoder, messages: list[Message], tools: Any = None) -> str:
    """Tests share renderings of the same messages."""
    return _render(encoder, json.dumps(messages), bool(tools))


@lru_cache(maxsize=1024)
def _render(encoder: PromptEncoder, messages: str, has_tools: bool) -> str:
    return encoder.render_chat(json.loads(messages), TOOLS if has_tools else None, True)


def check(encoder: PromptEncoder, messages: list[Message], *texts: str) -> None:
    """Require that the messages render with their texts, with tools and without."""
    for tools in (None, TOOLS):
        if not serves(encoder, tools):
            continue
        output = render(encoder, messages, tools)
        assert not [text for text in texts if text not in output], (messages, output)
        assert not find_python(output, encoder.format.chat_template), (messages, output)


def serves(encoder: PromptEncoder, tools: Any) -> bool:
    """Return False for a template that needs variables of its own, as of another program. Transformers cannot render it either."""
    try:
        render(encoder, PLAIN, tools)
    except PromptError:
        assert not any(in_transformers(encoder.format.chat_template, each, tools) for each in (PLAIN, AS_PARTS))
        return False
    return True


def find_python(output: str, source: str) -> list[str]:
    """Return the signs of Python's writing in a prompt. A list in a call that is written as Python is right."""
    return [sign for sign in SIGNS if sign in output and sign not in source and not (sign == "['" and "h=['" in output)]


def encoders() -> Iterator[Any]:
    for name, source in (OWN | {"strict": STRICT}).items():
        yield pytest.param(source, id=name)
    for path in REAL:
        yield pytest.param(path, id=path.stem[-60:])


@cache
def own_encoder(kind: str) -> PromptEncoder:
    return encoder_for(OWN[kind])
