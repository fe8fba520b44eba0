"""Finds the end of a JSON value while it is being generated."""

import msgspec

_OUTSIDE = frozenset('{}[]:,"0123456789+-.eEtrufalsn \t\r\n')
"""All characters that JSON has outside strings."""
PYTHON_OUTSIDE = _OUTSIDE | frozenset("'TFNo")
"""The same for JSON in which a model wrote Python's strings, True, False or None."""


class Scanner:
    """Tracks brackets and strings. A decoder validates the value once it is complete."""

    def __init__(self, quotes: str = '"', outside: "frozenset[str] | None" = _OUTSIDE) -> None:
        """`outside`: the only characters allowed outside strings. None: any."""
        self.depth = 0
        self._quotes, self._outside = quotes, outside
        self._quote = ""
        self._escaped = False
        self._controls: list[int] = []
        """Places of control characters within strings, in the text of the last scan."""

    def scan(self, text: str, until: int = 0) -> tuple[int, bool]:
        """Return (characters that belong to the value, whether it has ended). The value ends with the bracket that brings the depth down to
        `until`.

        Fewer characters than given, without an end, mean that the next character cannot belong to the value.
        """
        self._controls = []
        for at, char in enumerate(text):
            if self._quote:
                if char < " " and not self._escaped:
                    self._controls.append(at)
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif self._outside is not None and char not in self._outside:
                return at, False
            elif char in self._quotes:
                self._quote = char
            elif char in "{[(":
                self.depth += 1
            elif char in "}])":
                self.depth -= 1
                if self.depth <= until:
                    return at + 1, True
        return len(text), False

    def escape_controls(self, text: str) -> str:
        """Return the text of the last scan as JSON wants it. Models write line breaks into strings, as of code, without a backslash."""
        parts, start = [], 0
        for at in self._controls:
            parts += [text[start:at], msgspec.json.encode(text[at]).decode()[1:-1]]
            start = at + 1
        return "".join([*parts, text[start:]])


def escape_controls(value: str) -> str:
    """Return a value of JSON or Python with the control characters in its strings escaped."""
    scanner = Scanner("\"'", None)
    scanner.scan(value)
    return scanner.escape_controls(value)
