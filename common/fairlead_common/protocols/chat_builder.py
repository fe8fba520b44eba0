"""Builds the messages of a chat from the parts that the protocols have."""

from typing import Any


class ChatBuilder:
    """Builds chat messages from parts. The assistant's reasoning, text and tool calls of one turn form one message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The assistant's open message."""
        self._reasoning: list[str] = []
        """Of the open message: joined once, because a client can send it as many items."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        self._write_reasoning()
        return self._messages

    def add_message(self, role: str, content: Any) -> None:
        """Add a message of another role, which ends the assistant's turn.

        A second system message at the start extends the first: templates support only one.
        """
        self.end_turn()
        if role == "system" and len(self._messages) == 1 and self._messages[0]["role"] == "system":
            _append(self._messages[0], content)
            return
        self._messages.append({"role": role, "content": content})

    def add_tool_result(self, call: str, content: Any) -> None:
        """Add the result of a tool call."""
        self.end_turn()
        self._messages.append({"role": "tool", "tool_call_id": call, "content": content})

    def add_answer(self, content: Any) -> None:
        _append(self._turn(), content)

    def add_reasoning(self, reasoning: str) -> None:
        """Add reasoning. It starts a new message if the open one has content or tool calls."""
        if self._open is not None and (self._open.get("content") is not None or "tool_calls" in self._open):
            self.end_turn()
        self._turn()
        self._reasoning.append(reasoning)

    def add_tool_call(self, id: str, name: str, arguments: str) -> None:
        """Add a tool call. `arguments`: JSON."""
        calls = self._turn().setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def answer_open_calls(self, result: str) -> None:
        """Add `result` for each tool call of the last message."""
        for call in self._messages[-1].get("tool_calls", ()) if self._messages else ():
            self.add_tool_result(call["id"], result)

    def end_turn(self) -> None:
        """Start another message with the assistant's next part."""
        self._write_reasoning()
        self._open, self._reasoning = None, []

    def _write_reasoning(self) -> None:
        if self._open is not None and self._reasoning:
            self._open["reasoning_content"] = "".join(self._reasoning)

    def _turn(self) -> dict[str, Any]:
        if self._open is None:
            self._open = {"role": "assistant", "content": None}
            self._messages.append(self._open)
        return self._open


def _append(message: dict[str, Any], content: Any) -> None:
    """Append content to a message's. It grows in place: a client can send one part as many items."""
    if message["content"] is None:
        message["content"] = content
        return
    parts = message["content"]
    if isinstance(parts, str):
        parts = message["content"] = to_parts(parts)
    parts += to_parts(content)


def to_parts(content: Any) -> list[dict[str, Any]]:
    """Return a message's content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def join_texts(texts: list[str]) -> Any:
    """Return one text as a string, several as parts: the template decides what separates them."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": each} for each in texts]
