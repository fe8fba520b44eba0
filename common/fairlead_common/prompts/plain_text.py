"""Blocks and items that no chat template knows, as text that a model can read."""

from typing import Any

import msgspec

MEDIA = "[{kind} left out: this model reads text only]"
"""Stands for a picture or a file, so that the model knows that there was one."""
_MEDIA_TYPES = ("audio", "audio_url", "file", "image", "image_url", "input_audio", "input_file", "input_image", "video", "video_url")
_MAX_DEPTH = 16
_DROPPED = frozenset(("cache_control", "call_id", "caller", "id", "signature", "status", "tool_use_id"))
"""Keys of a block or an item without a meaning for the model. In what it carries, as arguments and schemas, they can have one."""
_CARRIED = frozenset(("action", "arguments", "input", "input_schema", "operation", "output", "parameters"))
"""Keys whose values are written by a model, or by a tool: of them only encrypted parts and the data of files are left out."""


def describe_part(part: dict[str, Any]) -> str:
    """Return the text that stands for a content part that is not text."""
    kind = part["type"]
    return MEDIA.format(kind=kind) if kind in _MEDIA_TYPES or is_media(part) else write_json(part)


def write_json(value: Any) -> str:
    """Return a block or an item as JSON without ids, encrypted parts and the data of files."""
    return msgspec.json.encode(_prune(value, _MAX_DEPTH, _DROPPED)).decode()


def write_carried(value: Any) -> str:
    """Return what a call or a result carries as JSON without encrypted parts and the data of files."""
    return msgspec.json.encode(_prune(value, _MAX_DEPTH, frozenset())).decode()


def write_arguments(value: Any) -> str:
    """Return the arguments of an earlier call as JSON text. A model may have written something else than an object."""
    return value if isinstance(value, str) else msgspec.json.encode({} if value is None else value).decode()


def is_media(block: dict[str, Any]) -> bool:
    """Return whether a block has the data of a file, or a reference to one."""
    if isinstance(source := block.get("source"), dict):
        return source.get("type") not in ("text", "content")
    return any(isinstance(block.get(field), dict | str) for field in ("image_url", "file_data", "file_id", "file_url", "input_audio"))


def _prune(value: Any, depth: int, dropped: frozenset[str]) -> Any:
    if depth == 0:
        return "…"
    if isinstance(value, list):
        return [_prune(each, depth - 1, dropped) for each in value]
    if not isinstance(value, dict):
        return value
    if "type" in value and is_media(value):
        return MEDIA.format(kind=value["type"])
    return {
        key: _prune(each, depth - 1, frozenset() if key in _CARRIED else dropped)
        for key, each in value.items()
        if key not in dropped and not key.startswith("encrypted_")
    }
