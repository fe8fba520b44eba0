"""Server-sent events with names."""

from typing import Any

import msgspec


def encode_named_event(event: dict[str, Any]) -> bytes:
    """Encode an event under the name of its own type."""
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
