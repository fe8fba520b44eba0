"""The border where replies of Redis are checked: what passes has the type, the shape and the range that the index's scripts give.

A client that can write to Redis forges values; a broken or hostile server sends anything. A reply of another shape is a BadReply, one of
REDIS_ERRORS: the index is unavailable for that call. A forged value in a reply of the right shape costs only its own record.
"""

import logging
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from fairlead_index.redis.connection import BadReply

log = logging.getLogger(__name__)

MAX_NUMBER: Final = 1e15
"""Largest number that counts, of tokens, pages, seconds or a rate. Sums and quotients of such numbers are finite."""
_BYTES: Final = frozenset((bytes,))
UNREADABLE: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error)
"""What parsing a reply raises where its shape is wrong."""


@contextmanager
def checked(what: str) -> Iterator[None]:
    """Turn an error of parsing a reply into a BadReply. `what`: describes the reply."""
    try:
        yield
    except UNREADABLE as error:
        raise unreadable(what, error) from error


def unreadable(what: str, error: Exception) -> BadReply:
    """Return the BadReply for one of UNREADABLE."""
    log.debug("%s cannot be read", what, exc_info=error)
    return BadReply(f"{what} cannot be read ({type(error).__name__}: {str(error)[:100]}): is it the index's Redis?")


def as_list(reply: Any, what: str) -> list[Any]:
    """Return a list. Raises BadReply."""
    if not isinstance(reply, list):
        raise BadReply(f"{what} is {type(reply).__name__}, not a list: is it the index's Redis?")
    return reply


def as_byte_strings(reply: Any, what: str, least: int = 0, most: int | None = None) -> list[bytes]:
    """Return a list of `least` to `most` byte strings. Raises BadReply."""
    items = as_list(reply, what)
    if len(items) < least or (most is not None and len(items) > most) or not set(map(type, items)) <= _BYTES:
        raise BadReply(f"{what} is no list of byte strings, or one of {len(items)}: is it the index's Redis?")
    return items


def as_number(value: Any, what: str) -> float:
    """Return a finite number of at most MAX_NUMBER. Raises BadReply."""
    with checked(what):
        number = float(value)
    if not is_sane(number):
        raise BadReply(f"{what} is {number:g}: is it the index's Redis?")
    return number


def is_sane(number: float) -> bool:
    """Return whether a number is finite and at most MAX_NUMBER in size."""
    return math.isfinite(number) and abs(number) <= MAX_NUMBER
