"""Fields by which a client could make the engine connect elsewhere: refused, except what `--allowed-remotes` lists. Pure.

vLLM and SGLang fetch media that a request names, also by a path of their own machine, and ask hosts in a request for KV blocks. Media in
`data:` URLs need no connection. A whole document is searched for these fields, because engines add new places for them. Only values that
no engine fetches are left out, such as schemas and arguments of tools.
"""

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec

from fairlead_common.protocols.paths import CHAT
from fairlead_common.truncate import quote, truncate

FIELDS: Final = frozenset(("kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"))
"""Fields that name a host from which the engine gets KV blocks or embeddings: vLLM's, then SGLang's."""
_MEDIA: Final = frozenset(f"{kind}{end}" for kind in ("image", "video", "audio") for end in ("", "s", "_data"))
"""Fields whose text is a place. SGLang takes a path too."""
_MEDIA_ENDS: Final = frozenset(("url", "urls", "uri", "uris"))
"""Such fields by the last word of their names."""
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
_CONTAINERS: Final = (dict, list)
_PLACE: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*+)://([A-Za-z0-9._-]{0,255}|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?([/?][^\\\s]*)?", re.A)
"""No user, backslash or blank: parsers disagree about their host."""
_LOOKS_REMOTE: Final = re.compile(r"\s*+[A-Za-z][A-Za-z0-9+.-]*+://\S*+\s*+", re.A)
"""Possessive (`*+`), as the scheme above: a long text is read once. Ignoring case would take four times as long."""
_DECODER: Final = msgspec.json.Decoder(float_hook=lambda text: None)
"""Leaves numbers with a fraction out: a number of 40 digits takes 16 µs to convert, and a body may have 320,000."""
_ENTRY: Final = re.compile(r"([a-z][a-z0-9+.-]*)://(\*|(?:\*\.)?[a-z0-9._-]+|\[[0-9a-f:.]+\])")


class RemoteRefused(Exception):
    """A field that is not allowed. The message names it, its value and what to do."""


class _Field(NamedTuple):
    """A field that is not allowed."""

    value: Any
    name: str
    is_kwargs: bool
    """Whether a field above it is one of _KWARGS."""


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

    def check(self, body: bytes, path: str = "") -> None:
        """Raise RemoteRefused for a body that names a place that is not allowed, or that is not JSON. `path`: of the request.

        The time is linear in the body: 8 KB of chat take 10 to 30 µs, the 65,536 objects that a body may have 40 ms. Searching the bytes
        for the fields' names first takes longer.
        """
        try:
            document = _DECODER.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RemoteRefused(f"the body is not JSON in UTF-8: {error}") from error
        if not isinstance(document, dict):
            return
        skipped = _FREE_FORM_AT_TOP | {"documents"} if path == CHAT else _FREE_FORM_AT_TOP  # a chat's documents are for its template
        document = {name: value for name, value in document.items() if name not in skipped}
        if (found := self._find_refused(document)) is None:
            return
        try:
            where = truncate(_path_to(document, found)[1:])
        except RecursionError:  # some hundred levels
            where = found.name
        if found.name in FIELDS:
            raise RemoteRefused(
                f"{where} is not allowed: the engine would connect to other hosts. Allow it with --allowed-remotes {found.name}"
            )
        raise RemoteRefused(
            f"{where}: {quote(found.value)} is not allowed, because the engine would fetch it. Send a data: URL, or list its "
            "SCHEME://HOST in --allowed-remotes of the agent"
        )

    def _find_refused(self, document: dict[str, Any]) -> _Field | None:
        """Return a field that is not allowed. Only lists and objects are put off: most values of a large body are neither."""
        rest: list[tuple[Any, str, bool]] = [(document, "", False)]
        while rest:
            value, name, is_kwargs = rest.pop()
            if isinstance(value, list):
                if is_kwargs or name == "data" or _is_media(name):
                    for each in value:
                        if isinstance(each, str) and not self._is_allowed(each, name, is_kwargs):
                            return _Field(each, name, is_kwargs)
                rest += [(each, name, is_kwargs) for each in value if isinstance(each, _CONTAINERS) and each]
                continue
            for key, each in _fields_of(value, is_kwargs):
                within = is_kwargs or key in _KWARGS
                if key in FIELDS:
                    if each and key not in self._fields:
                        return _Field(each, key, within)
                elif isinstance(each, str):
                    if not self._is_allowed(each, key, within):
                        return _Field(each, key, within)
                elif isinstance(each, _CONTAINERS) and each:
                    rest.append((each, key, within))
        return None

    def _is_allowed(self, text: str, name: str, is_kwargs: bool) -> bool:
        if _is_media(name):
            return not text or text[:5].lower() == "data:" or self._lists(text)
        if name == "data" or is_kwargs:
            return not _LOOKS_REMOTE.fullmatch(text) or self._lists(text)
        return True

    def _lists(self, text: str) -> bool:
        found = _PLACE.fullmatch(text)
        if found is None:
            return False
        scheme, host = found[1].lower(), found[2].lower()
        wider = [f"*{host[at:]}" for at, letter in enumerate(host) if letter == "."]
        return any((scheme, one) in self._places for one in ("*", host, *wider))


def _is_media(name: str) -> bool:
    return name in _MEDIA or name[-5:].rpartition("_")[2] in _MEDIA_ENDS


def _fields_of(value: dict[str, Any], is_kwargs: bool) -> Iterable[tuple[str, Any]]:
    kind = value.get("type")
    skipped = _FREE_FORM | {"input"} if isinstance(kind, str) and kind in _TOOL_USE else _FREE_FORM
    plain = frozenset[str]() if is_kwargs else _PLAIN
    return [(name, each) for name, each in value.items() if name not in skipped and not (name in plain and isinstance(each, str))]


def _path_to(value: Any, wanted: _Field, name: str = "", is_kwargs: bool = False) -> str:
    """Return the path of a field below `value`, as in `.messages[0].content`; empty if it is not there. `name`: of the field of `value`."""
    if value is wanted.value and (name, is_kwargs) == (wanted.name, wanted.is_kwargs):
        return " "
    if isinstance(value, list):
        inner = ((f"[{at}]", each, name, is_kwargs) for at, each in enumerate(value))
    elif isinstance(value, dict):
        inner = ((f".{truncate(key)}", each, key, is_kwargs or key in _KWARGS) for key, each in _fields_of(value, is_kwargs))
    else:
        return ""
    return next((step + found for step, *rest in inner if (found := _path_to(rest[0], wanted, *rest[1:]))), "").rstrip()
