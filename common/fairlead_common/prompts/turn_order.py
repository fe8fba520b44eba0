"""The orders of turns that a chat template accepts, and messages arranged in one of them.

Agents' programs send several messages of one role in a row, system messages in mid-conversation, text beside tool results, and histories
whose beginning was cut off. Templates that require alternating turns refuse these, or leave them out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, Literal

from fairlead_common.prompts.chat_template import REASONING_FIELDS

ContentStyle = Literal["text", "one part", "parts", "both"]
"""A string, a list of one part, a list of any parts, or a string or any parts as the client sent it."""
Message = dict[str, Any]
_INSTRUCTIONS: Final = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Fillers:
    """What stands in messages that have no content of their own, and the styles of content by role."""

    styles: dict[str, ContentStyle]
    beside_calls: Message = field(default_factory=dict)
    """The content field of an assistant's message that has calls and no content."""
    empty_result: str = ""
    """The text of a result that is empty. Some templates refuse none."""


@dataclass(frozen=True, slots=True)
class TurnOrder:
    """What a template renders."""

    system: bool = True
    """System messages."""
    later_system: bool = True
    """System messages after the first message."""
    developer: bool = True
    """Developer messages."""
    later_developer: bool = True
    """Developer messages after the first message."""
    repeated: bool = True
    """Two messages of the user, or two answers, in a row."""
    repeated_calls: bool = True
    """Two answers with calls in a row."""
    text_and_call: bool = True
    """Two answers in a row of which one has calls."""
    text_after_call: bool = True
    """An answer between a call and its result."""
    text_beside_calls: bool = True
    """Text in a message with calls."""
    parallel_calls: bool = True
    """Several calls in a message."""
    results: bool = True
    """Tools' results."""
    orphan_results: bool = True
    """Results without a call in the turn before."""
    open_calls: bool = True
    """Calls without a result, before another turn."""
    question_after_result: bool = True
    """A user message directly after a tool's result."""
    answer_first: bool = True
    """An answer before the user's first message."""
    call_first: bool = True
    """The same with a call."""
    no_question: bool = True
    """Conversations without a message of the user."""


ANY_ORDER: Final = TurnOrder()


def text_in_style(text: str, style: ContentStyle) -> Any:
    """Return a text as content in the style."""
    return [{"type": "text", "text": text}] if style in ("parts", "one part") else text


def parts_in_style(texts: list[str], style: ContentStyle) -> Any:
    """Return several texts as content in the style."""
    if style in ("text", "one part"):
        return text_in_style("\n".join(texts), style)
    return [{"type": "text", "text": text} for text in texts]


def arrange(messages: list[Message], order: TurnOrder, fillers: Fillers) -> list[Message]:
    """Return messages in an order that the template accepts. No text is lost.

    What the template does not render at its place becomes a user message, or is added to the message before. Where a turn has to be there,
    an empty one is put in.
    """
    if order == ANY_ORDER:
        return messages
    steps = (
        (order.system and order.later_system and order.developer and order.later_developer and order.no_question, _place_instructions),
        (order.results and order.orphan_results and order.open_calls and order.text_after_call, _place_results),
        (order.answer_first and order.call_first and order.no_question, _begin_with_question),
        (order.later_system and order.repeated and order.repeated_calls and order.text_and_call, _join_repeated),
        (order.parallel_calls, _split_calls),
        (order.question_after_result, _join_questions),
    )
    for is_accepted, step in steps:
        if not is_accepted:
            messages = list(step(messages, order, fillers))
    return messages


def answer_open_calls(messages: list[Message], order: TurnOrder, fillers: Fillers) -> list[Message]:
    """Put empty results between calls and the answer that the conversation ends with, where it would be moved before them.

    An answer that is to be continued has to stay last.
    """
    start = next((at + 1 for at in reversed(range(len(messages))) if messages[at]["role"] != "assistant"), 0)
    end = next((at + 1 for at in reversed(range(start, len(messages))) if "tool_calls" in messages[at]), start)
    if (order.text_and_call and order.repeated_calls) or end == len(messages):
        return messages
    results = [_empty_result(call, fillers) for each in messages[start:end] for call in each.get("tool_calls", ())]
    return [*messages[:end], *results, *messages[end:]]


def _place_instructions(messages: list[Message], order: TurnOrder, fillers: Fillers) -> Iterator[Message]:
    """Give each system and developer message a role that the template renders at its place."""
    roles = [each["role"] for each in messages]
    start = next((at for at, role in enumerate(roles) if role not in _INSTRUCTIONS), len(roles))
    question = start - 1 if not order.no_question and "user" not in roles else None
    first = ""
    """The first message's role, as long as only instructions follow it: one that may not follow is joined to it."""
    for at, message in enumerate(messages):
        role = message["role"]
        if role == "developer" and not (order.later_developer if at else order.developer):
            role = "system"
        if at == question:
            role = "user"
        elif role == "system" and not (order.later_system if at else order.system):
            role = first or "user"
        first = role if role in _INSTRUCTIONS and (first or at == 0) else ""
        yield message if role == message["role"] else {**message, "role": role, "content": _in_style(_texts(message), fillers.styles[role])}


def _place_results(messages: list[Message], order: TurnOrder, fillers: Fillers) -> Iterator[Message]:
    """Give each call of an earlier turn a result, and write a result without call as text of the user."""
    turns = list(_turns(messages))
    for turn in turns:
        calls = {str(call.get("id")): call for each in turn for call in each.get("tool_calls", ())}
        results = {str(each.get("tool_call_id")) for each in turn if each["role"] == "tool"}
        others: list[Message] = []
        kept: list[Message] = []
        for each in turn:
            is_kept = each["role"] != "tool" or (order.results and (order.orphan_results or str(each.get("tool_call_id")) in calls))
            (kept if is_kept else others).append(each)
        if results and not order.text_after_call:
            kept.sort(key=lambda each: (each["role"] == "tool", "tool_calls" in each))
        if not order.open_calls and turn is not turns[-1]:
            end = max((at + 1 for at, each in enumerate(kept) if each["role"] == "tool" or "tool_calls" in each), default=0)
            kept[end:end] = [_empty_result(call, fillers) for id, call in calls.items() if id not in results]
        yield from kept
        for each in others:
            written = "\n".join(["<tool_response>", *_texts(each), "</tool_response>"])
            yield {"role": "user", "content": text_in_style(written, fillers.styles["user"])}


def _turns(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield answers in a row with the results after them, and each other message by itself."""
    turn: list[Message] = []
    for message in messages:
        before, role = turn[-1]["role"] if turn else "", message["role"]
        if turn and not (before in ("assistant", role) and role in ("assistant", "tool")):
            yield turn
            turn = []
        turn.append(message)
    yield turn


def _empty_result(call: Message, fillers: Fillers) -> Message:
    content = text_in_style(fillers.empty_result, fillers.styles["tool"])
    return {"role": "tool", "tool_call_id": call.get("id"), "name": call["function"]["name"], "content": content}


def _begin_with_question(messages: list[Message], order: TurnOrder, fillers: Fillers) -> list[Message]:
    """Put an empty question before an answer that the conversation begins with."""
    roles = [each["role"] for each in messages]
    start = next((at for at, role in enumerate(roles) if role not in _INSTRUCTIONS), len(roles))
    first = messages[start] if start < len(messages) else {"role": ""}
    is_accepted = first["role"] != "assistant" or (order.call_first if "tool_calls" in first else order.answer_first)
    if is_accepted and (order.no_question or "user" in roles):
        return messages
    return [*messages[:start], _empty_question(fillers), *messages[start:]]


def _join_repeated(messages: list[Message], order: TurnOrder, fillers: Fillers) -> Iterator[Message]:
    """Join messages of one role in a row."""
    keeps = {"system": order.later_system, "developer": order.later_developer, "user": order.repeated}
    for role, messages_of_role in groupby(messages, key=lambda each: each["role"]):
        run = list(messages_of_role)
        calls = [each for each in run if "tool_calls" in each]
        if role == "assistant":
            keeps[role] = (order.repeated, order.text_and_call, order.repeated_calls)[min(len(calls), 2)]
        if keeps.get(role, True) or len(run) == 1:
            yield from run
        elif calls and len(calls) < len(run) and not order.text_beside_calls:
            yield _joined([each for each in run if "tool_calls" not in each], fillers)
            yield _empty_question(fillers)
            yield _joined(calls, fillers)
        else:
            yield _joined(run, fillers)


def _empty_question(fillers: Fillers) -> Message:
    return {"role": "user", "content": text_in_style("", fillers.styles["user"])}


def _split_calls(messages: list[Message], _: TurnOrder, fillers: Fillers) -> Iterator[Message]:
    """Make a message of each call of a message, with the call's results after it."""
    groups: list[list[Message]] = []
    by_call: dict[str, list[Message]] = {}
    for message in messages:
        calls = message.get("tool_calls", ())
        if message["role"] == "tool":
            if (group := by_call.get(str(message.get("tool_call_id")))) is not None:
                group.append(message)
                continue
        else:
            by_call = {}
        groups.append([message if len(calls) < 2 else {**message, "tool_calls": [calls[0]]}])
        groups += ([{"role": "assistant", **fillers.beside_calls, "tool_calls": [call]}] for call in calls[1:])
        if len(calls) > 1:
            by_call = {str(call.get("id")): group for call, group in zip(calls, groups[-len(calls) :], strict=True)}
    return (message for group in groups for message in group)


def _join_questions(messages: list[Message], _: TurnOrder, fillers: Fillers) -> Iterator[Message]:
    """Add questions to the result before them."""
    groups: list[list[Message]] = []
    for message in messages:
        if groups and groups[-1][0]["role"] == "tool" and message["role"] == "user":
            groups[-1].append(message)
        else:
            groups.append([message])
    return (_joined(group, fillers) if len(group) > 1 else group[0] for group in groups)


def _joined(group: list[Message], fillers: Fillers) -> Message:
    """Return messages as one with the role of the first."""
    role = group[0]["role"]
    joined: Message = {}
    for message in group:
        joined |= message if message["role"] == role else {}
    for name in REASONING_FIELDS:
        if name in joined:
            joined[name] = "\n".join(message[name] for message in group if name in message)
    texts = [text for message in group for text in _texts(message)]
    if "tool_calls" in joined:
        joined["tool_calls"] = [call for message in group for call in message.get("tool_calls", ())]
        if not any(map(str.strip, texts)):
            return {key: value for key, value in joined.items() if key != "content"} | fillers.beside_calls
        texts = list(filter(str.strip, texts))
    return {**joined, "content": _in_style(texts, fillers.styles[role])}


def _texts(message: Message) -> list[str]:
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _in_style(texts: list[str], style: ContentStyle) -> Any:
    return text_in_style(texts[0], style) if len(texts) == 1 else parts_in_style(texts, style)
