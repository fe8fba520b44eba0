"""Patterns that are matched against growing text at every token. Each match must be cheap, whatever the model writes."""

from functools import cache

import regex

MAX_BLANKS = 256
"""Blanks that are allowed between the parts of a call. A longer run ends the search, because it could continue forever."""


def match(pattern: str, text: str, partial: bool) -> "regex.Match[str] | None":
    """Match `pattern` at the start of a text. `partial`: also return a match that the end of the text cuts off.

    Each `\\s*` takes MAX_BLANKS at most and is possessive. Two of them in a row would otherwise try every split of a run of blanks, as
    many as its length, at each token. So no other part of a pattern may need a blank that stands before it.
    """
    return _compile(pattern).match(text, partial=partial)


@cache
def _compile(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(pattern.replace(r"\s*", rf"\s{{0,{MAX_BLANKS}}}+"))
