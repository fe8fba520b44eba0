"""Fields by which a client could make the engine connect elsewhere: refused, except what `--allowed-remotes` lists. Pure.

vLLM and SGLang fetch media that a request names, also by a path of their own machine, and ask hosts in a request for KV blocks. Media in
`data:` URLs need no connection. A whole document is searched for these fields, because engines add new places for them. Only values that
no engine fetches are left out, such as schemas and arguments of tools.
"""

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec

from fairlead_common.truncate import quote, truncate

FIELDS: Final = frozenset(("kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"))
"""Fields that name a host from which the engine gets KV blocks or embeddings: vLLM's, then SGLang's."""
_MEDIA: Final = re.compile(r"(.*_)?ur[li]s?|(image|video|audio)(s|_data)?")
"""Fields whose text is a place. SGLang takes a path too."""
_KWARGS: Final = frozenset(("mm_processor_kwargs", "media_io_kwargs"))
"""Fields whose texts are places if they look like one."""
_FREE_FORM: Final = frozenset(
    ("parameters", "input_schema", "function", "arguments", "schema", "json_schema", "guided_json", "annotations", "citations", "action")
)
"""Fields of any content, which no engine fetches."""
_FREE_FORM_AT_TOP: Final = frozenset(("metadata", "response_format", "structured_outputs", "chat_template_kwargs"))
_TOOL_USE: Final = frozenset(("tool_use", "server_tool_use", "mcp_tool_use"))
"""Types of Anthropic's parts whose `input` are the arguments of a tool."""
_PLAIN: Final = frozenset(("role", "content", "text", "type", "model", "prompt", "name", "id"))
"""Fields whose text is never a place: most of a request's."""
_PLACE: Final = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]{0,255}|\[[0-9a-f:.]+\])(:[0-9]{1,5})?([/?][^\\\s]*)?", re.I | re.A)
"""No user, backslash or blank: parsers disagree about their host."""
_LOOKS_REMOTE: Final = re.compile(r"\s*[a-z][a-z0-9+.-]*://\S*\s*", re.I | re.A)
_ENTRY: Final = re.compile(r"([a-z][a-z0-9+.-]*)://(\*|(?:\*\.)?[a-z0-9._-]+|\[[0-9a-f:.]+\])")


class RemoteRefused(Exception):
    """A field that is not allowed. The message names it, its value and what to do."""


class _Field(NamedTuple):
    """A value of the document, and where it is."""

    value: Any
    name: str
    """Name of the field; of a list's element that of the list."""
    is_kwargs: bool
    parent: "_Field | None"
    at: int | None = None
    """Number in the list."""

    def __str__(self) -> str:
        parts: list[str] = []
        each: _Field | None = self
        while each is not None:
            parts.append(f".{each.name}" if each.at is None else f"[{each.at}]")
            each = each.parent
        return truncate("".join(reversed(parts))[1:])


class AllowedRemotes:
    """What `--allowed-remotes` lists: `SCHEME://HOST`, where HOST may begin with `*`, and names of FIELDS."""

    def __init__(self, text: str) -> None:
        """Raises ValueError for an entry that is neither."""
        self._fields: set[str] = set()
        self._places: set[tuple[str, str]] = set()
        for entry in filter(None, (part.strip() for part in text.split(","))):
            if entry in FIELDS:
                self._fields.add(entry)
            elif found := _ENTRY.fullmatch(entry.lower()):
                self._places.add((found[1], found[2]))
            else:
                raise ValueError(
                    f"{entry!r} is neither SCHEME://HOST, as in https://images.example.com, nor one of {', '.join(sorted(FIELDS))}"
                )

    def check(self, body: bytes) -> None:
        """Raise RemoteRefused for a body that names a place that is not allowed, or that is not JSON.

        The time is linear in the body: 8 KB of chat take 10 to 30 µs. Searching the bytes for the fields' names first takes longer.
        """
        try:
            self._check_document(msgspec.json.decode(body))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RemoteRefused(f"the body is not JSON in UTF-8: {error}") from error

    def _check_document(self, document: Any) -> None:
        if not isinstance(document, dict):
            return
        rest = [_Field(value, name, name in _KWARGS, None) for name, value in document.items() if name not in _FREE_FORM_AT_TOP]
        while rest:
            field = rest.pop()
            value, name = field.value, field.name
            if name in FIELDS:
                if value and name not in self._fields:
                    raise RemoteRefused(
                        f"{field} is not allowed: the engine would connect to other hosts. Allow it with --allowed-remotes {name}"
                    )
            elif isinstance(value, str):
                if not self._is_allowed(value, field):
                    raise RemoteRefused(
                        f"{field}: {quote(value)} is not allowed, because the engine would fetch it. Send a data: URL, or list its "
                        "SCHEME://HOST in --allowed-remotes of the agent"
                    )
            elif isinstance(value, list):
                rest += [
                    _Field(each, name, field.is_kwargs, field, at) for at, each in enumerate(value) if isinstance(each, str | list | dict)
                ]
            elif isinstance(value, dict):
                rest += [_Field(each, key, field.is_kwargs or key in _KWARGS, field) for key, each in _fields_of(value, field.is_kwargs)]

    def _is_allowed(self, text: str, field: _Field) -> bool:
        if _MEDIA.fullmatch(field.name):
            return not text or text[:5].lower() == "data:" or self._lists(text)
        if field.name == "data" or field.is_kwargs:
            return not _LOOKS_REMOTE.fullmatch(text) or self._lists(text)
        return True

    def _lists(self, text: str) -> bool:
        found = _PLACE.fullmatch(text)
        if found is None:
            return False
        scheme, host = found[1].lower(), found[2].lower()
        wider = [f"*{host[at:]}" for at, letter in enumerate(host) if letter == "."]
        return any((scheme, one) in self._places for one in ("*", host, *wider))


def _fields_of(value: dict[str, Any], is_kwargs: bool) -> Iterable[tuple[str, Any]]:
    kind = value.get("type")
    skipped = _FREE_FORM | {"input"} if isinstance(kind, str) and kind in _TOOL_USE else _FREE_FORM
    plain = frozenset[str]() if is_kwargs else _PLAIN
    return [(name, each) for name, each in value.items() if name not in skipped and not (name in plain and isinstance(each, str))]
