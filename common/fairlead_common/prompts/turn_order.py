"""The orders of turns that a chat template accepts, and messages arranged in one of them.

Agents' programs send several user messages in a row, system messages in mid-conversation, and text beside tool results. Templates that
require alternating turns refuse these, or leave them out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from fairlead_common.prompts.chat_template import REASONING_FIELDS

ContentStyle = Literal["text", "one part", "parts", "both"]
"""A string, a list of one part, a list of any parts, or a string or any parts as the client sent it."""
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TurnOrder:
    """What a template renders."""

    system: bool = True
    """System messages."""
    later_system: bool = True
    """System messages after the first message."""
    repeated: bool = True
    """Two messages of the user, or two answers, in a row."""
    question_after_result: bool = True
    """A user message directly after a tool's result."""


ANY_ORDER: Final = TurnOrder()


def text_in_style(text: str, style: ContentStyle) -> Any:
    """Return a text as content in the style."""
    return [{"type": "text", "text": text}] if style in ("parts", "one part") else text


def parts_in_style(texts: list[str], style: ContentStyle) -> Any:
    """Return several texts as content in the style."""
    if style in ("text", "one part"):
        return text_in_style("\n".join(texts), style)
    return [{"type": "text", "text": text} for text in texts]


def arrange(messages: list[Message], order: TurnOrder, styles: Mapping[str, ContentStyle]) -> list[Message]:
    """Return messages in an order that the template accepts. No text is lost.

    A system message that the template does not render becomes a user message. A message that may not follow the one before is added to it.
    `styles`: of content by role, as the messages have it.
    """
    if order == ANY_ORDER:
        return messages
    groups: list[list[Message]] = []
    """Messages of each turn: joined once, because a client can send many."""
    for message in messages:
        first = groups[-1][0] if groups else {}
        is_allowed = first.get("role") == "system" or (order.later_system if groups else order.system)
        if message["role"] == "system" and not is_allowed:
            message = {**message, "role": "user", "content": _in_style(_texts(message), styles["user"])}
        if _must_join(first, message, order):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_joined(group, styles) if len(group) > 1 else group[0] for group in groups]


def _must_join(first: Message, message: Message, order: TurnOrder) -> bool:
    """Return whether a message must be added to a turn that begins with `first`."""
    roles = (first.get("role"), message["role"])
    if roles == ("tool", "user"):
        return not order.question_after_result
    if roles == ("system", "system"):
        return not order.later_system
    if roles == ("assistant", "assistant") and ("tool_calls" in first or "tool_calls" in message):
        return False
    return not order.repeated and roles in (("user", "user"), ("assistant", "assistant"))


def _joined(group: list[Message], styles: Mapping[str, ContentStyle]) -> Message:
    role = group[0]["role"]
    joined: Message = {}
    for message in group:
        joined |= message if message["role"] == role else {}
    for name in REASONING_FIELDS:
        if name in joined:
            joined[name] = "\n".join(message[name] for message in group if name in message)
    return {**joined, "content": _in_style([text for message in group for text in _texts(message)], styles[role])}


def _texts(message: Message) -> list[str]:
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _in_style(texts: list[str], style: ContentStyle) -> Any:
    return text_in_style(texts[0], style) if len(texts) == 1 else parts_in_style(texts, style)
