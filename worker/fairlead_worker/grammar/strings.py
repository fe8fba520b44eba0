"""Formats and patterns of strings, in the terms of llguidance."""

import re

from fairlead_worker.grammar.schema_walk import Node, add_all_of

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats of llguidance."""
_NARROWER = {
    "idn-email": "email",
    "name-email": "email",
    "idn-hostname": "hostname",
    "ipv6network": "ipv6",
    "ipv6interface": "ipv6",
    "uri-reference": "uri",
    "iri": "uri",
    "iri-reference": "uri",
    "multi-host-uri": "uri",
}
"""Formats whose documents include those of another format."""
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_NETWORK = "|".join(
    rf"{_BYTE}(?:\.{_BYTE}){{{kept - 1}}}(?:\.0){{{4 - kept}}}/(?:{sizes})"
    for kept, sizes in ((1, "[89]|[12][0-9]|3[0-2]"), (2, "1[6-9]|2[0-9]|3[0-2]"), (3, "2[4-9]|3[0-2]"), (4, "32"))
)
_PATTERNS = {
    "ipv4network": f"^(?:{_NETWORK})$",
    "ipv4interface": rf"^{_BYTE}(?:\.{_BYTE}){{3}}/(?:[12]?[0-9]|3[0-2])$",
    "byte": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "base64url": "^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?$",
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
    "color": "^#[0-9a-fA-F]{6}$",
} | {
    f"uuid{version}": f"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$" for version in range(1, 9)
}
_PATTERNS |= {"base64": _PATTERNS["byte"], "ipvanynetwork": _PATTERNS["ipv4network"], "ipvanyinterface": _PATTERNS["ipv4interface"]}
_ANY_ADDRESS = {"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}

_WITHOUT_LOOK_AROUND = {
    # pydantic: Decimal
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)$",
    # zod: email, duration
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        r"^P(?:[0-9]+W|(?:[0-9]+Y(?:[0-9]+M)?(?:[0-9]+D)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:T{0})?|T{0})$".replace(
            "{0}", r"(?:[0-9]+H(?:[0-9]+M)?(?:[0-9]+(?:[.,][0-9]+)?S)?|[0-9]+M(?:[0-9]+(?:[.,][0-9]+)?S)?|[0-9]+(?:[.,][0-9]+)?S)"
        )
    ),
}
"""Patterns that schema libraries write, and the same without look-around, which derivatives of expressions do not have."""
_CLASSES = {r"\d": "0-9", r"\w": "_0-9A-Za-z"}
"""Each ends with a range, after which a hyphen is only a hyphen."""


def rewrite_string(node: Node) -> None:
    """Replace a node's format and pattern by those of llguidance with the same or fewer texts.

    An unknown format says nothing, as JSON Schema defines: `int32`, `password`, `binary`, `path`.
    """
    name = node.get("format")
    if isinstance(name, str) and name not in FORMATS:
        del node["format"]
        if name in _NARROWER:
            node["format"] = _NARROWER[name]
        elif name == "ipvanyaddress":
            add_all_of(node, _ANY_ADDRESS)
        elif name in _PATTERNS and "pattern" not in node:
            node["pattern"] = _PATTERNS[name]
        elif name in _PATTERNS:
            add_all_of(node, {"pattern": _PATTERNS[name]})
    pattern = node.get("pattern")
    if isinstance(pattern, str):
        node["pattern"] = _WITHOUT_LOOK_AROUND.get(pattern, pattern)


def use_ascii_classes(pattern: str) -> str:
    r"""Return an expression whose `\d` and `\w` are ASCII, as in ECMAScript, vLLM and SGLang. A negated set keeps its own: there fewer
    characters would mean more texts."""
    out: list[str] = []
    inside = negated = False
    for token in re.findall(r"\\.?|\[\^?\]?|[^\\\[]", pattern, re.DOTALL):
        if token.startswith("[") and not inside:
            inside, negated = True, token.startswith("[^")
        elif token == "]":
            inside = False
        classes = None if inside and negated else _CLASSES.get(token)
        if classes and inside and out[-1] == "-":
            out[-1] = r"\-"  # no range begins before a class
        out.append(token if classes is None else classes if inside else f"[{classes}]")
    return "".join(out)
