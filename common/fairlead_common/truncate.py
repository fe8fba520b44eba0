"""Limits on the client input that errors repeat. Without them a 1 MB model name returns as a 1 MB error."""

from typing import Any, Final

ECHO_CHARACTERS: Final = 200
MESSAGE_CHARACTERS: Final = 1000
"""Limit of a whole message, for library errors that repeat their input."""


def truncate(text: object, most: int = ECHO_CHARACTERS) -> str:
    """Return `text` with at most `most` characters: its beginning, and its end (a quarter), where errors state their cause."""
    whole, last = str(text), most // 4
    return whole if len(whole) <= most else f"{whole[: most - last]}…{whole[-last:]} ({len(whole)} characters)"


def quote(value: Any) -> str:
    """Return a client's value for an error message: its repr, at most 200 characters of it."""
    return truncate(repr(value[: ECHO_CHARACTERS + 1] if isinstance(value, str) else value))
