"""Patterns that are tried on text while it grows, token after token: each try has to cost little, whatever the model writes."""

from functools import cache

import regex

MAX_BLANKS = 256
"""Taken for what may stand between the parts of a call. Behind more of them no part is looked for: they could go on for ever."""


def match(pattern: str, text: str, partial: bool) -> "regex.Match[str] | None":
    """`pattern` at the beginning of a text; `partial`: or as much of it as there is, where the text ends too early.

    Its `\\s*` takes MOST_BLANKS at most and gives none back: two of them in a row would try every way to share a run of blanks, which
    are as many as its length, at each token. So nothing else that a pattern has may need a blank that stood in front of it.
    """
    return _compiled(pattern).match(text, partial=partial)


@cache
def _compiled(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(pattern.replace(r"\s*", rf"\s{{0,{MAX_BLANKS}}}+"))
