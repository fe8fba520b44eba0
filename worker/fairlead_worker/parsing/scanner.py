"""Where a JSON value ends, found while it is being written."""

_OUTSIDE = frozenset('{}[]:,"0123456789+-.eEtrufalsn \t\r\n')
"""All that JSON has outside its strings."""


class Scanner:
    """Follows brackets and strings; whether what they hold is right is for a decoder to say once all is there."""

    def __init__(self, quotes: str = '"', outside: "frozenset[str] | None" = _OUTSIDE) -> None:
        """`outside`: the only characters outside strings; None: any."""
        self.depth = 0
        self._quotes, self._outside = quotes, outside
        self._quote = ""
        self._escaped = False

    def scan(self, text: str, until: int = 0) -> tuple[int, bool]:
        """(characters that belong to the value, whether it has ended): up to the bracket that brings the depth down to `until`.

        Fewer characters than there are, and no end: the next one is nothing that the value can hold.
        """
        for at, char in enumerate(text):
            if self._quote:
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
