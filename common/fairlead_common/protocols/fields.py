"""Checks shared by the protocols. Each error names the field as the client wrote it, and what to do."""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import msgspec

from fairlead_common.errors import PromptError
from fairlead_common.prompts.content_parts import json_type


class SharedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of vLLM and Fairlead that have the same meaning in every protocol. Chat completions validate them."""

    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    seed: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = None
    min_tokens: Any = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    structured_outputs: Any = None
    cache_salt: Any = None
    priority: Any = None
    chat_template_kwargs: Any = None


SHARED_FIELDS = SharedFields.__struct_fields__


def refuse(field: str, reason: str) -> NoReturn:
    """Raise PromptError."""
    raise PromptError(field, reason)


def check_text(value: Any, field: str) -> str:
    """Return a string value. Raises PromptError for any other type."""
    if not isinstance(value, str):
        refuse(field, f"must be a string, not {json_type(value)}")
    return str(value)


def iterate_objects(value: Any, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, element) for each element of a list of objects."""
    if not isinstance(value, list):
        refuse(field, f"must be a list, not {json_type(value)}")
    for at, element in enumerate(value):
        if not isinstance(element, dict):
            refuse(f"{field}[{at}]", f"must be an object, not {json_type(element)}")
        yield f"{field}[{at}]", element


def require_text(value: dict[str, Any], name: str, field: str) -> str:
    """Return a required string member of an object."""
    if value.get(name) is None:
        refuse(f"{field}.{name}", "is missing")
    return check_text(value[name], f"{field}.{name}")


def refuse_fields(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse unsupported fields. Null, false and empty values count as absent."""
    for field, reason in reasons.items():
        if body.get(field) not in (None, False, [], {}):
            refuse(field, reason)


def refuse_values(body: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], field: str = "") -> None:
    """Refuse unsupported values of fields of which only some values are supported."""
    for name, values in allowed.items():
        if (given := body.get(name)) is not None and given not in values:
            other = f", or give {' or '.join(map(repr, values))}" if values else ""
            refuse(f"{field}{name}", f"{given!r:.80} is not supported; leave it out{other}")


class ChatBuilder:
    """Builds chat messages from parts. The assistant's reasoning, text and tool calls of one turn form one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The assistant's open message."""

    def add_message(self, role: str, content: Any) -> None:
        """Add a message of another role, which ends the assistant's turn.

        A second system message at the start extends the first: templates support only one.
        """
        self._open = None
        if role == "system" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            first = self.messages[0]
            first["content"] = [*to_parts(first["content"]), *to_parts(content)]
            return
        self.messages.append({"role": role, "content": content})

    def add_tool_result(self, call: str, content: Any) -> None:
        """Add the result of a tool call."""
        self._open = None
        self.messages.append({"role": "tool", "tool_call_id": call, "content": content})

    def add_answer(self, content: Any) -> None:
        turn = self._turn()
        turn["content"] = content if turn.get("content") is None else [*to_parts(turn["content"]), *to_parts(content)]

    def add_reasoning(self, reasoning: str) -> None:
        """Add reasoning. It starts a new message if the open one has content or tool calls."""
        if self._open is not None and (self._open.get("content") is not None or "tool_calls" in self._open):
            self._open = None
        turn = self._turn()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + reasoning

    def add_tool_call(self, id: str, name: str, arguments: str) -> None:
        """Add a tool call. `arguments`: JSON."""
        calls = self._turn().setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def end_turn(self) -> None:
        """Start another message with the assistant's next part."""
        self._open = None

    def _turn(self) -> dict[str, Any]:
        if self._open is None:
            self._open = {"role": "assistant", "content": None}
            self.messages.append(self._open)
        return self._open


def to_parts(content: Any) -> list[dict[str, Any]]:
    """Return a message's content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def join_texts(texts: list[str]) -> Any:
    """Return one text as a string, several as parts: the template decides what separates them."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": each} for each in texts]
