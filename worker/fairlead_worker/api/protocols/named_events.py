"""Server-sent events with names."""

import msgspec

from fairlead_common.protocols.answer import Answer


def encode_named_event(event: Answer) -> bytes:
    """Encode an event under the name of its own type."""
    name: str = event.type if hasattr(event, "type") else event.__struct_config__.tag  # type: ignore[assignment]  # all tags are strings
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
