"""Which lines of a log survive a crash. Pure.

After a crash a file may end within a line, and after a power loss it may also hold zeros or old bytes from the first block on that was not
written. A line counts if it and all lines before it are complete JSON objects: no prefix of an object is one, and JSON allows no zeros.
"""

from collections.abc import Iterable, Iterator

import msgspec


class _Any(msgspec.Struct):
    """Any JSON object."""


_decoder = msgspec.json.Decoder(_Any)


def complete_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the leading lines that are complete JSON objects, each with its line break."""
    rest = b""
    for chunk in chunks:
        parts = (rest + chunk).split(b"\n")
        rest = parts.pop()
        for part in parts:
            try:
                _decoder.decode(part)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return
            yield part + b"\n"
