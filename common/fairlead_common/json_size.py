"""Bounds on what a JSON text costs to decode, counted in its bytes before any object is built.

A decoder holds Python's lock for 0.2 to 0.4 µs for each object, list and key, and for 0.02 µs for each plain value: 8 MiB of `[],` stop a
process for 0.6 s, wherever a thread runs. A value ends at one of `,:[{` or is the text itself, so the number of these bytes bounds the
nodes. Deleting all others costs 0.5 ns a byte. Only a text that exceeds a bound by this count is counted again without its strings. So are
the digits of long numbers, which are converted one by one: every 83rd byte of a text tells that it has few.
"""

import math
from itertools import accumulate
from typing import Final

import msgspec

MAX_DEPTH: Final = 512
"""Nested objects and lists. Decoders recurse, and Python ends them at 1,000 levels."""
MAX_OBJECTS: Final = 1 << 16
"""Objects, lists and keys: 16 to 28 ms of a decoder. The largest real bodies (1,000 messages, 128 tools) have 20,000."""
MAX_VALUES: Final = 320_000
"""All nodes beside the token ids of one context: 2,048 texts or 300,000 token ids of an embedding request, with room."""
MAX_STRINGS: Final = 2 * MAX_OBJECTS
"""Keys and texts: to count a text without its strings takes 0.1 µs for each."""
_STRIDE, _IN_A_ROW = 83, 12
"""Every 83rd byte of a text is read to tell whether it has long numbers. A prime, so that lists of equally long numbers do not look so."""
LONG: Final = _IN_A_ROW * _STRIDE
"""Digits from which a number is long: Python takes 6 to 10 ns for each digit of shorter ones, and up to 30 ns of those at its own bound of
4,300. Those of a text are counted in steps of so many."""
MAX_LONG_DIGITS: Final = 800 * LONG
"""Digits in long numbers: 24 ms."""
_BRACKETS: Final = b"[]{}"
_NOT_MARKS: Final = bytes(set(range(256)) - set(b",:[{"))
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(_BRACKETS))
_DIGITS: Final = bytes.maketrans(b"123456789", b"000000000")
_ONE_KIND: Final = bytes.maketrans(b"{}", b"[]")
_OPEN: Final = ord("[")
FLAT: Final = 16
"""Depth of ordinary texts. Each level of it is removed at memory speed."""


class JsonTooLarge(ValueError):
    """A JSON text exceeds a bound. The message names the bound and the fix."""


class JsonSize(msgspec.Struct, frozen=True):
    """Upper bounds of a text's nodes. `objects`: objects, lists and keys. `values`: all nodes, with these."""

    objects: int
    values: int


def check_json(raw: bytes, max_tokens: int = 0, exact_above: int = MAX_OBJECTS) -> JsonSize:
    """Return the size of a text that may be decoded. It is exact if the cheap count finds more than `exact_above` objects.

    `max_tokens`: token ids of the longest prompt, for texts that may hold them: an array of them has one node for each.
    Raises JsonTooLarge.
    """
    size, opened = _count(raw.translate(None, _NOT_MARKS))
    has_many_nodes = opened > MAX_DEPTH or size.objects > min(MAX_OBJECTS, exact_above) or size.values > MAX_VALUES + max_tokens
    if has_many_nodes or _may_have_long_digits(raw):
        outside = _without_strings(raw, MAX_VALUES + max_tokens)
        size, opened = _count(outside.translate(None, _NOT_MARKS))
        _refuse_above(size, MAX_VALUES + max_tokens)
        if _may_have_long_digits(outside):
            _refuse_long_digits(outside)
        if opened > MAX_DEPTH:
            _check_depth(outside)
    return size


def read_float(text: str) -> float:
    """Return the number of a JSON text, as a `float_hook` of decoders of untyped fields. Raises ValueError beyond the range of a float.

    msgspec's own conversion takes 12 to 25 µs for 17 or more digits and a small exponent, so 8 MiB of them stopped a process for 2 to 5 s.
    Python's takes a tenth.
    """
    number = float(text)
    if math.isinf(number):
        raise ValueError("Number out of range")
    return number


def _count(marks: bytes) -> tuple[JsonSize, int]:
    """Return the size by the bytes `,:[{` of a text, and the number of its objects and lists."""
    opened = marks.count(b"[") + marks.count(b"{")
    return JsonSize(opened + marks.count(b":"), len(marks) + 1), opened


def _without_strings(raw: bytes, max_strings: int) -> bytes:
    """Return the bytes outside the strings of a text; of an invalid text, at least those that a decoder reads before its error.

    A backslash is valid in strings only, so a decoder ends at any other.
    """
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if (strings := raw.count(b'"') // 2) > min(MAX_STRINGS, max_strings):
        raise JsonTooLarge(f"it has {strings} JSON texts and keys, and at most {min(MAX_STRINGS, max_strings)} are allowed: send fewer")
    return b"".join(raw.split(b'"')[::2])


def _may_have_long_digits(raw: bytes) -> bool:
    """Return whether a text may have more than MAX_LONG_DIGITS, in strings or outside: each step has twelve of the bytes that are read."""
    return len(raw) > MAX_LONG_DIGITS and raw[::_STRIDE].translate(_DIGITS).count(b"0" * _IN_A_ROW) * LONG > MAX_LONG_DIGITS


def _refuse_long_digits(outside: bytes) -> None:
    if (digits := outside.translate(_DIGITS).count(b"0" * LONG) * LONG) > MAX_LONG_DIGITS:
        raise JsonTooLarge(
            f"it has {digits} digits in numbers of at least {LONG}, and at most {MAX_LONG_DIGITS} are allowed: send shorter numbers"
        )


def _refuse_above(size: JsonSize, max_values: int) -> None:
    if size.objects > MAX_OBJECTS:
        raise JsonTooLarge(f"it has {size.objects} JSON objects, lists and keys, and at most {MAX_OBJECTS} are allowed: send fewer")
    if size.values > max_values:
        raise JsonTooLarge(f"it has {size.values} JSON values and keys, and at most {max_values} are allowed: send fewer")


def _check_depth(outside: bytes) -> None:
    """Raise JsonTooLarge for a text that is nested too deeply. `outside`: its bytes outside strings."""
    brackets, depth = outside.translate(_ONE_KIND, _NOT_BRACKETS), MAX_DEPTH
    for _ in range(FLAT):  # without its empty pairs, the depth is one less
        if len(brackets) <= depth:
            return
        brackets, depth = brackets.replace(b"[]", b""), depth - 1
    if max(accumulate(brackets, lambda depth, bracket: depth + (1 if bracket == _OPEN else -1), initial=0)) > depth:
        raise JsonTooLarge(f"it has more than {MAX_DEPTH} objects or lists within each other: nest them less deeply")
