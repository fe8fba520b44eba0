"""The same metrics under other names, so that dashboards made for other systems show them. On the exposition's text: no library needed."""

from collections.abc import Mapping, Sequence

_HELP = b"# HELP "


def with_aliases(text: bytes, names: Mapping[str, Sequence[str]]) -> bytes:
    """A Prometheus exposition, and behind it each family of `names` again under each of its other names, with the same labels and values.

    Names are those of the text: a counter's end in `_total`.
    """
    copies: list[bytes] = []
    for family in (b"\n" + text.rstrip(b"\n")).split(b"\n" + _HELP)[1:]:  # at a line's beginning only: labels hold what clients sent
        name = family.split(b" ", 1)[0]
        for other in names.get(name.decode(), ()):
            copies.append(_HELP + b"\n".join(_renamed(line, name, other.encode()) for line in family.split(b"\n")) + b"\n")
    return text + b"".join(copies)


def _renamed(line: bytes, name: bytes, other: bytes) -> bytes:
    for lead in (b"", b"# TYPE "):
        if line.startswith(lead + name):
            return lead + other + line[len(lead) + len(name) :]
    return line
