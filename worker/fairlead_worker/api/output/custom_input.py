"""The input of a custom tool, from the arguments of the function that stands for it."""

from typing import Any

from pydantic_core import from_json

from fairlead_common.prompts.other_calls import INPUT

_GROWTH = 1.125
"""The input is read from the JSON so far whenever that has grown by this factor, so that the work is linear."""


class CustomInput:
    """The input of one call. The returned texts add up to it."""

    def __init__(self) -> None:
        self._written: list[str] = []
        self._length = self._next = 0
        self._shown = ""

    def add(self, text: str) -> str:
        """Add a part of the arguments. Return the next part of the input, which may be empty."""
        self._written.append(text)
        self._length += len(text)
        if self._length < self._next:
            return ""
        self._next = int(self._length * _GROWTH)
        shown = read_object("".join(self._written)).get(INPUT)  # under another name only if it is the only one, which the end decides
        return self._advance(shown if isinstance(shown, str) else "")

    def finish(self) -> str:
        """Return the last part of the input."""
        return self._advance(read_input("".join(self._written)))

    def _advance(self, text: str) -> str:
        if not text.startswith(self._shown):
            return ""
        before, self._shown = self._shown, text
        return text[len(before) :]


def read_input(arguments: str) -> str:
    """Return the input: the argument of this name, else the only one that is a text, else the arguments as they are."""
    read = read_object(arguments)
    values = [read[INPUT]] if INPUT in read else list(read.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments


def read_object(text: str) -> dict[str, Any]:
    """Return arguments as far as they are a JSON object: an answer can be cut anywhere."""
    try:
        value = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
