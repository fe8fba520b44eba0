"""Limits on the client input that errors repeat. Without them a 1 MB model name returns as a 1 MB error."""

from typing import Any, Final

import msgspec

ECHO_CHARACTERS: Final = 200
MESSAGE_CHARACTERS: Final = 1000
"""Limit of a whole message, for library errors that repeat their input."""


def truncate(text: object, max_characters: int = ECHO_CHARACTERS) -> str:
    """Shorten `text` to `max_characters`: its beginning, and its end (a quarter), where errors state their cause."""
    full, last = str(text), max_characters // 4
    return full if len(full) <= max_characters else f"{full[: max_characters - last]}…{full[-last:]} ({len(full)} characters)"


def quote(value: Any) -> str:
    """Return a client's value for an error message, at most 200 characters of it: a text in quotes, any other value as JSON."""
    if isinstance(value, str):
        return truncate(repr(value[: ECHO_CHARACTERS + 1]))
    return truncate(msgspec.json.encode(value, enc_hook=repr).decode())
