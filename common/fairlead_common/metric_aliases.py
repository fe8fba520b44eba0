"""Aliases of metrics, so that dashboards of other systems work. They are added to the exposition's text, without a library."""

from collections.abc import Mapping, Sequence

_HELP = b"# HELP "


def add_aliases(text: bytes, names: Mapping[str, Sequence[str]]) -> bytes:
    """Return a Prometheus exposition, followed by a copy of each family in `names` under each alias, with the same labels and values.

    Names are those in the text: a counter's ends in `_total`.
    """
    copies: list[bytes] = []
    for family in (b"\n" + text.rstrip(b"\n")).split(b"\n" + _HELP)[1:]:  # only at the start of a line: labels may contain clients' text
        name = family.split(b" ", 1)[0]
        for other in names.get(name.decode(), ()):
            copies.append(_HELP + b"\n".join(_rename(line, name, other.encode()) for line in family.split(b"\n")) + b"\n")
    return text + b"".join(copies)


def _rename(line: bytes, name: bytes, other: bytes) -> bytes:
    for lead in (b"", b"# TYPE "):
        if line.startswith(lead + name):
            return lead + other + line[len(lead) + len(name) :]
    return line
