"""Parsing of requests: the fields of a new batch, lifetimes, and the page of a list. Pure. Every error names its field."""

import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from fairlead_common.truncate import quote
from fairlead_router.batch.validation import ENDPOINTS
from fairlead_router.errors import ApiError

LONGEST_WINDOW: Final = 14 * 86_400
LIFETIMES: Final = (3600, 30 * 86_400)
"""Bounds of expires_after.seconds, as in OpenAI's API."""
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_Record = TypeVar("_Record")


class _ExpiresAfter(msgspec.Struct):
    anchor: str
    seconds: int


class NewBatch(msgspec.Struct):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: _ExpiresAfter | None = None


def invalid(message: str, param: str | None = None, code: str = "invalid_request") -> ApiError:
    """Return a 400."""
    return ApiError(400, message, param=param, code=code)


def parse_batch(body: bytes) -> NewBatch:
    """Return the fields of a new batch. Raises ApiError 400."""
    try:
        new = msgspec.json.decode(body, type=NewBatch)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"The body is not a JSON object with input_file_id, endpoint and completion_window: {error}.") from None
    if new.endpoint not in ENDPOINTS:
        raise invalid(f"endpoint is {quote(new.endpoint)}; give one of {', '.join(ENDPOINTS)}.", "endpoint")
    metadata = new.metadata or {}
    if len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise invalid("metadata may have 16 keys of at most 64 characters, with values of at most 512.", "metadata")
    window_seconds(new.completion_window)
    return new


def window_seconds(window: str) -> int:
    """Return the seconds of a completion window. Raises ApiError 400."""
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not 0 < seconds <= LONGEST_WINDOW:
        raise invalid(f"completion_window is {quote(window)}; give 24h, or another time up to 14d in s, m, h or d.", "completion_window")
    return seconds


def lifetime_seconds(given: _ExpiresAfter | None, default: int, param: str) -> int:
    """Return the seconds until a file expires. Raises ApiError 400."""
    if given is None:
        return default
    if given.anchor != "created_at" or not LIFETIMES[0] <= given.seconds <= LIFETIMES[1]:
        raise invalid(f"{param} needs anchor created_at and seconds from {LIFETIMES[0]} to {LIFETIMES[1]}.", param)
    return given.seconds


def form_lifetime(form: Mapping[str, str], default: int) -> int:
    """Return the seconds until an uploaded file expires, from the form's fields. Raises ApiError 400."""
    anchor, seconds = form.get("expires_after[anchor]", ""), form.get("expires_after[seconds]", "")
    if not anchor and not seconds:
        return default
    return lifetime_seconds(_ExpiresAfter(anchor, int(seconds) if seconds.isdecimal() else 0), default, "expires_after")


def choose_page(records: list[_Record], query: Mapping[str, str], default: int, maximum: int) -> tuple[list[_Record], bool]:
    """Return the records of one page, and whether more follow. Raises ApiError 400.

    `query`: `limit`, `after` (the id of the last record of the previous page), `order` (`records` are in descending order).
    """
    text = query.get("limit", str(default))
    limit = int(text) if text.isdecimal() and len(text) < 9 else 0
    if not 1 <= limit <= maximum:
        raise invalid(f"limit is {quote(text)}; give a number from 1 to {maximum}.", "limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid(f"order is {quote(order)}; give asc or desc.", "order")
    if order == "asc":
        records = records[::-1]
    start, after = 0, query.get("after")
    if after is not None:
        start = next((number for number, record in enumerate(records, start=1) if _id(record) == after), 0)
        if not start:
            raise invalid(f"after is {quote(after)}, which is not the id of an object of this list.", "after")
    return records[start : start + limit], len(records) > start + limit


def _id(record: Any) -> str:
    return str(record.id)
