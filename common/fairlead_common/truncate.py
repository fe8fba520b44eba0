"""How much of a client's input an error repeats. Without a bound a 1 MB model name comes back as a 1 MB error."""

from typing import Any, Final

ECHO_CHARACTERS: Final = 200
MESSAGE_CHARACTERS: Final = 1000
"""Of a whole message: the bound behind the bound, for texts of libraries that repeat their input."""


def brief(text: object, most: int = ECHO_CHARACTERS) -> str:
    """Return `text` with at most `most` characters: its beginning, and its last quarter of them, where errors name their cause."""
    whole, last = str(text), most // 4
    return whole if len(whole) <= most else f"{whole[: most - last]}…{whole[-last:]} ({len(whole)} characters)"


def quoted(value: Any) -> str:
    """Return a client's value for an error message: its repr, at most 200 characters of it."""
    return brief(repr(value[: ECHO_CHARACTERS + 1] if isinstance(value, str) else value))
