"""Tools that clients run themselves and whose schema Anthropic and OpenAI publish: models of other families get it as a function."""

from typing import Any, Final

_TEXT: Final = {"type": "string"}
_RANGE: Final = {"type": "array", "items": {"type": "integer"}, "description": "First and last line; -1 as the last means the end."}
_FILE_FIELDS: Final[dict[str, Any]] = {
    "path": _TEXT,
    "file_text": {"type": "string", "description": "The whole text of the file, for create."},
    "old_str": {"type": "string", "description": "The text to replace, for str_replace. It must be in the file once."},
    "new_str": {"type": "string", "description": "The text in its place, for str_replace."},
    "insert_line": {"type": "integer", "description": "The line after which insert adds its text; 0 is the beginning."},
    "insert_text": {"type": "string", "description": "The text to add, for insert."},
    "view_range": _RANGE,
}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


_EDITOR = (
    "Views, creates and edits files.",
    _object(["command", "path"], command=_commands("view", "create", "str_replace", "insert"), **_FILE_FIELDS),
)
_BASH = (
    "Runs a command in a bash session that keeps its state.",
    _object([], command=_TEXT, restart={"type": "boolean", "description": "Restarts the session; then there is no command."}),
)
ANTHROPIC: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "memory_20250818": (
        "Keeps files under /memories for later conversations.",
        _object(
            ["command"],
            command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
            **_FILE_FIELDS,
            old_path={"type": "string", "description": "For rename."},
            new_path={"type": "string", "description": "For rename."},
        ),
    ),
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
}
"""Description and schema by type."""
LOCAL_SHELL: Final = (
    "Runs a program on the user's machine and returns its output.",
    _object(
        ["command"],
        command={"type": "array", "items": _TEXT, "description": "The program and its arguments."},
        working_directory=_TEXT,
        timeout_ms={"type": "integer"},
    ),
)
"""OpenAI's `local_shell`: the fields of its action."""
