"""The forms of messages that a chat template reads, found by rendering a conversation in each form and looking for its texts.

Templates fail on a form that they do not read, drop it silently, or print it as Python writes it. Only their output tells.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from fairlead_common.prompts.turn_order import ContentStyle, Fillers, Message, TurnOrder, arrange, text_in_style

ArgumentForm = Literal["object", "object of texts", "text"]
"""Arguments of a call: an object, an object whose lists and objects are JSON texts, or one JSON text."""
Render = Callable[[list[Message]], str | None]
"""Renders messages. Returns None if the template refuses them."""

SYSTEM, QUESTION, ANSWER, NEXT, LAST = "fairleadsystem", "fairleadquestion", "fairleadanswer", "fairleadnext", "fairleadlast"
CALL, OTHER_CALL, KEY, VALUE, RESULT, OTHER_RESULT = (f"fairlead{word}" for word in ("call", "other", "key", "value", "result", "rest"))
REASONING, DEVELOPER = "fairleadthought", "fairleaddeveloper"
_TEXTS: Final = (SYSTEM, DEVELOPER, QUESTION, ANSWER, NEXT, LAST, CALL, OTHER_CALL, RESULT, OTHER_RESULT)
_MARK: Final = "fairleadmark"
"""A key of content parts, which only a printed part shows."""
_OTHER_IDS = ("call_0123456789", "call_0")
_ID, _OTHER_ID = "fairlead0", "fairlead1"
"""Ids of nine letters and digits, which Mistral's templates require."""


@dataclass(frozen=True, slots=True)
class MessageForms:
    """What a template reads."""

    fillers: Fillers
    beside_calls_if_empty: Message
    """The same for a message whose content is empty."""
    without_calls: Message
    """The content field of an assistant's message that has neither calls nor content."""
    arguments: ArgumentForm
    keeps_calls: bool
    """False if the template does not render calls."""
    names_results: bool
    """True if the template requires the function's name in a result."""
    short_ids: bool
    """True if ids of calls must be nine letters and digits, as in Mistral's templates."""
    splits_text: Mapping[bool, bool]
    """By whether a message with calls has reasoning: True if its content must be a message of its own, because the call is lost or refused
    beside it."""
    reads_thinking_parts: bool
    """True if the template renders reasoning as a part of the content only, as Mistral's do."""
    order: TurnOrder


def find_forms(render: Render) -> MessageForms:
    """Return the forms that a template reads."""
    return _Probe(render).find()


def probe_role(render: Render, role: str, style: ContentStyle) -> bool:
    """Return whether the template renders messages with this role. Many templates silently leave them out."""
    messages = [{"role": role, "content": text_in_style(QUESTION, style)}, {"role": "user", "content": text_in_style(NEXT, style)}]
    return QUESTION in (render(messages) or "")


class _Probe:
    """The steps of a probe. Each builds upon the styles that the steps before it found."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._styles: dict[str, ContentStyle] = {}
        """The styles found so far; before that, one in which the template renders a question at all."""
        self._none_count = 0
        """How often the word None is in a rendering that was given none."""
        self._names_results = False

    def find(self) -> MessageForms:
        for style in ("text", "parts"):
            self._styles = dict.fromkeys(("system", "user", "assistant", "tool"), style)
            if any(self._count(dialogue, (QUESTION,)) > 0 for dialogue in self._dialogues()):
                break
        else:
            self._styles = dict.fromkeys(self._styles, "text")
        for role in ("user", "assistant", "system"):
            self._styles[role] = self._find_style(self._dialogues(), role)
        self._styles["developer"] = self._styles["system"]
        if probe_role(self._render, "developer", self._styles["user"]):
            self._styles["developer"] = self._find_style([[self._message("developer", SYSTEM), *self._dialogues()[1]]], "developer")
        plain = self._render(self._dialogues()[0]) or self._render(self._dialogues()[1]) or ""
        self._none_count = plain.count("None")
        beside, arguments = self._find_call_form()
        if not self._keeps_result(beside, arguments):
            self._names_results = True
            named = self._find_call_form()
            self._names_results = self._keeps_result(*named)
            beside, arguments = named if self._names_results else (beside, arguments)
        until_result, whole = self._call_dialogues(beside, arguments)
        # A trimmed conversation may begin with any message, and some templates take the style of all from the first.
        self._styles["tool"] = self._find_style([until_result, whole, whole[2:]], "tool")
        spoken, beside_text = self._dialogues()[1], self._text_beside_call(arguments)
        self._styles["assistant"] = self._find_style([*self._dialogues(), beside_text, spoken[1:], beside_text[1:]], "assistant")
        until_result = self._call_dialogues(beside, arguments)[0]
        keeps_calls = self._count(until_result, (CALL, VALUE)) > 0
        empty = {"content": text_in_style("", self._styles["assistant"])}
        keeps_empty = self._score_calls(empty, arguments) >= self._score_calls(beside, arguments)
        fillers = Fillers(self._styles, beside, self._find_empty_result(until_result))
        return MessageForms(
            fillers=fillers,
            beside_calls_if_empty=empty if keeps_empty else beside,
            without_calls=self._find_empty_answer(),
            arguments=arguments,
            keeps_calls=keeps_calls,
            names_results=self._names_results,
            short_ids=keeps_calls and any(self._count(self._call_dialogues(beside, arguments, id)[0], (CALL,)) < 0 for id in _OTHER_IDS),
            splits_text={thinks: keeps_calls and self._must_split_text(beside, arguments, thinks) for thinks in (False, True)},
            reads_thinking_parts=self._reads_thinking_parts(),
            order=self._find_order(fillers, arguments, keeps_calls),
        )

    def _message(self, role: str, text: str) -> Message:
        return {"role": role, "content": text_in_style(text, self._styles.get(role, "text"))}

    def _result(self, text: str, id: str, name: str) -> Message:
        return {**self._message("tool", text), "tool_call_id": id, **({"name": name} if self._names_results else {})}

    def _dialogues(self) -> list[list[Message]]:
        """Return a conversation with a system message, which some templates refuse, and the same without."""
        told = (("user", QUESTION), ("assistant", ANSWER), ("user", NEXT), ("assistant", LAST))
        spoken = [self._message(role, text) for role, text in told]
        return [[self._message("system", SYSTEM), *spoken], spoken]

    def _call_dialogues(self, beside: Message, arguments: ArgumentForm, id: str = _ID) -> list[list[Message]]:
        """Return conversations with a call: one that ends with its result, and one that goes on after an answer."""
        said = {"role": "assistant", **beside, "tool_calls": [make_call(id, CALL, arguments)]}
        result = self._result(RESULT, id, CALL)
        until_result = [self._message("user", QUESTION), said, result]
        return [until_result, [*until_result, self._message("assistant", ANSWER), self._message("user", NEXT)]]

    def _text_beside_call(self, arguments: ArgumentForm) -> list[Message]:
        return self._call_dialogues(self._message("assistant", ANSWER), arguments)[0]

    def _find_style(self, dialogues: list[list[Message]], role: str) -> ContentStyle:
        """Return the style of content that the template reads in messages of a role, in all of these conversations that have the role."""
        dialogues = [each for each in dialogues if any(message["role"] == role for message in each)]
        as_text, one, two = (self._render_with(dialogues, role, parts) for parts in (0, 1, 2))
        usable = [at for at in range(len(dialogues)) if as_text[at] is not None or one[at] is not None]
        if not usable:
            return "text"
        if all(as_text[at] is not None for at in usable):
            return "both" if all(as_text[at] == one[at] and two[at] is not None for at in usable) else "text"
        if all(two[at] is not None for at in usable):
            return "parts"
        return "one part" if all(one[at] is not None for at in usable) else "text"

    def _render_with(self, dialogues: list[list[Message]], role: str, parts: int) -> list[str | None]:
        """Render conversations with a role's content as text (0) or as 1 or 2 parts. None: refused, or the content is not in the output."""
        outputs = []
        for dialogue in dialogues:
            changed, expected = [], []
            for message in dialogue:
                if message["role"] == role:
                    content = message["content"]
                    text = content if isinstance(content, str) else content[0]["text"]
                    texts = [text, f"{text}2"][: max(1, parts)]
                    expected += texts
                    made = [{"type": "text", "text": each, _MARK: ""} for each in texts]
                    message = {**message, "content": made if parts else text}
                changed.append(message)
            output = self._render(changed)
            # A template may drop old messages, so a text is required where the role's last message is kept.
            kept = output is not None and _MARK not in output and all(text in output for text in expected)
            outputs.append(output if kept else None)
        return outputs

    def _find_call_form(self) -> tuple[Message, ArgumentForm]:
        """Return the content field of a message with calls only, and the form of their arguments."""
        nothing: list[Message] = [{}, {"content": None}, {"content": ""}, {"content": [{"type": "text", "text": ""}]}]
        forms: tuple[ArgumentForm, ...] = ("object", "object of texts", "text")
        best, found = -3, (nothing[0], forms[0])
        for style in ("text", "parts"):
            self._styles["tool"] = style
            for arguments in forms:
                for beside in nothing:
                    score = self._score_calls(beside, arguments)
                    if score > best:
                        best, found = score, (beside, arguments)
                    if best == _PERFECT:
                        return found
        self._styles["tool"] = "text" if self._styles["user"] != "parts" else "parts"
        return found

    def _keeps_result(self, beside: Message, arguments: ArgumentForm) -> bool:
        return self._count(self._call_dialogues(beside, arguments)[0], (RESULT,)) > 0

    def _score_calls(self, beside: Message, arguments: ArgumentForm) -> int:
        until_result, whole = self._call_dialogues(beside, arguments)
        wanted = (QUESTION, CALL, KEY, VALUE, RESULT)
        return self._count(until_result, wanted) + self._count(whole, (*wanted, ANSWER, NEXT))

    def _count(self, dialogue: list[Message], wanted: Sequence[str]) -> int:
        """Return how many of the texts are in the output, less the signs of Python's own writing; -1 for a refusal."""
        output = self._render(dialogue)
        return -1 if output is None else sum(text in output for text in wanted) - self._count_reprs(output)

    def _count_reprs(self, output: str) -> int:
        """Return how many signs of Python's writing of a value are in the output. A list in a call written as Python is right."""
        nested = f"['{VALUE}']" in output and f"{KEY}=['{VALUE}']" not in output
        return (f"'{KEY}'" in output) + nested + (output.count("None") > self._none_count)

    def _find_empty_answer(self) -> Message:
        """Return the content field of an empty answer. Mistral's templates refuse an empty text."""
        style = self._styles["assistant"]
        question, answer, following = self._dialogues()[1][:3]
        wanted = (QUESTION, NEXT)
        candidates: list[Message] = [{"content": text_in_style(text, style)} for text in ("", " ")]
        scores = [self._count([question, {**answer, **content}, following], wanted) for content in candidates]
        return candidates[scores.index(max(scores))]

    def _find_empty_result(self, until_result: list[Message]) -> str:
        *before, result = until_result
        texts = ("", " ", "(no output)")
        scores = [self._count([*before, {**result, **self._message("tool", text)}], (QUESTION, CALL)) for text in texts]
        return texts[scores.index(max(scores))]

    def _reads_thinking_parts(self) -> bool:
        """Return whether reasoning is rendered as a part of the content, and not as a field of the message."""
        question, answer = self._dialogues()[1][:2]
        parts = [{"type": "thinking", "thinking": REASONING, _MARK: ""}, {"type": "text", "text": ANSWER, _MARK: ""}]
        output = self._render([question, {**answer, "content": parts}]) or _MARK
        is_read = REASONING in output and ANSWER in output and _MARK not in output
        return is_read and REASONING not in (self._render([question, {**answer, "reasoning_content": REASONING}]) or "")

    def _must_split_text(self, beside: Message, arguments: ArgumentForm, thinks: bool) -> bool:
        question, said, *others = self._call_dialogues(beside, arguments)[0]
        if thinks:
            said = {**said, "reasoning_content": REASONING}
        answer = self._message("assistant", ANSWER)
        whole, split = [question, {**said, **answer}, *others], [question, answer, said, *others]
        return self._count(whole, (CALL,)) < self._count(split, (CALL,))

    def _find_order(self, fillers: Fillers, arguments: ArgumentForm, keeps_calls: bool) -> TurnOrder:
        """Return the orders of turns that render. A conversation that shows more texts when it is arranged shows that one does not."""
        system, question, answer, following, last = self._dialogues()[0]
        later, developer = self._message("system", LAST), self._message("developer", DEVELOPER)
        calls = [make_call(_ID, CALL, arguments), make_call(_OTHER_ID, OTHER_CALL, arguments)]
        call, other_call, both = (
            {"role": "assistant", **fillers.beside_calls, "tool_calls": each} if keeps_calls else self._message("assistant", CALL)
            for each in (calls[:1], calls[1:], calls)
        )
        result, other_result = self._result(RESULT, _ID, CALL), self._result(OTHER_RESULT, _OTHER_ID, OTHER_CALL)
        orphan = {**self._message("tool", RESULT), "tool_call_id": _ID}
        cases: list[tuple[tuple[str, ...], list[list[Message]]]] = [
            (("repeated",), [[question, following, answer], [question, answer, last, following]]),
            (("system", "later_system"), [[system, question]]),
            (
                ("later_system",),
                [[system, question, later], [system, question, later, following], [system, question, answer, later, following]],
            ),
            (("developer", "later_developer"), [[developer, question]]),
            (
                ("later_developer",),
                [[system, developer, question], [question, developer], [developer, question, answer, developer, following]],
            ),
            (("results",), [[question, call, result]]),
            (("parallel_calls",), [[question, both, result, other_result]]),
            (("repeated_calls",), [[question, call, other_call, result, other_result, last, following]]),
            (("text_and_call",), [[question, answer, call, result, last, following]]),
            (("text_after_call",), [[question, call, answer, result, last, following]]),
            (("question_after_result",), [[question, call, result, following]]),
            (
                ("orphan_results",),
                [[orphan, last, following], [question, answer, orphan, last, following], [question, orphan, last, following]],
            ),
            (("open_calls",), [[question, call, following], [question, both, result, following]]),
            (("answer_first",), [[answer, following], [system, answer, following]]),
            (("call_first",), [[call, result, last, following]]),
            (("no_question",), [[system], [answer], [system, answer], [call, result]]),
        ]
        beside_text = self._text_beside_call(arguments)
        order = TurnOrder(text_beside_calls=not keeps_calls or self._count(beside_text, (ANSWER,)) > 0)
        for flags, dialogues in cases:
            if keeps_calls or flags[0] not in _OF_CALLS:
                other = replace(order, **dict.fromkeys(flags, False))
                plain, arranged = (sum(self._count_texts(arrange(each, by, fillers)) for each in dialogues) for by in (order, other))
                order = order if plain >= arranged else other
        return order

    def _count_texts(self, dialogue: list[Message]) -> int:
        """Return how many of a probe's texts in a conversation are in the output, as `_count` does."""
        given = json.dumps(dialogue)
        return self._count(dialogue, [text for text in _TEXTS if text in given])


def make_call(id: str, name: str, arguments: ArgumentForm) -> Message:
    """Return a call for a probe, with a list as its only argument."""
    values: dict[ArgumentForm, Any] = {
        "object": {KEY: [VALUE]},
        "object of texts": {KEY: f'["{VALUE}"]'},
        "text": f'{{"{KEY}": ["{VALUE}"]}}',
    }
    return {"id": id, "type": "function", "function": {"name": name, "arguments": values[arguments]}}


_OF_CALLS: Final = ("parallel_calls", "repeated_calls", "text_and_call", "text_after_call", "orphan_results", "open_calls", "call_first")
"""Orders of messages with calls, which a template without calls does not get."""
_PERFECT: Final = 12
"""The score of a call whose two conversations show all texts."""
