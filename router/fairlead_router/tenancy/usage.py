"""What an answer used, as the worker says: in a header of a whole answer, in a comment near the end of a stream."""

import re

_COMMENT = re.compile(rb"\n: usage (\d{1,9}) (\d{1,9})\n\n")
_HEADER = re.compile(rb"(\d{1,9}) (\d{1,9})")
TAIL = 128


class UsageMeter:
    """Reads over the shoulder of one answer. `prompt` and `output`: tokens; estimated where the worker did not come to say them."""

    def __init__(self, prompt: int) -> None:
        self.prompt, self.output = prompt, 0
        self.is_exact = False
        self._tail = b""

    def read_header(self, said: bytes | None) -> None:
        """The header of a whole answer."""
        if said is not None and (found := _HEADER.fullmatch(said)):
            self._set(found)

    def feed(self, piece: bytes) -> None:
        """A piece of a stream. Until the worker says better, every event is a token: in JSON a line break is never two in a row."""
        if self.is_exact:
            return
        self._tail = self._tail[-TAIL:] + piece if len(piece) < TAIL else piece
        if (found := _COMMENT.search(self._tail, max(0, len(self._tail) - 4 * TAIL))) is not None:
            self._set(found)
        else:
            self.output += piece.count(b"\n\n")

    def _set(self, found: "re.Match[bytes]") -> None:
        self.prompt, self.output, self.is_exact = int(found[1]), int(found[2]), True
