"""Keys of stored responses: one for each, derived by whoever knows the tenant, so that Redis and its users can neither read nor forge one.

A router derives them from a secret that only routers have, and sends a worker those that its request needs. Derivation is HKDF-Expand of
one block (RFC 5869). The context starts with a label and the length of the tenant's name, so that no two pairs share one.
"""

import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

HEADER: Final = b"x-fairlead-response-keys"
"""Header in which a router sends `ResponseKeys` to a worker."""
ID: Final = re.compile(r"resp_[0-9a-f]{32}")
_HEADER: Final = re.compile(rb"([0-9a-f]{32})((?: resp_[0-9a-f]{32}=[0-9a-f]{64}){1,2})")


@dataclass(frozen=True, slots=True)
class ResponseKeys:
    """What one request may do with stored responses. `tag`: pseudonym of the tenant, to count what it stores."""

    tag: str
    keys: Mapping[str, bytes] = field(repr=False)
    """Keys by response id, 32 bytes each. The first one is of the response to be stored, or of the one in the path."""

    @property
    def first_id(self) -> str:
        return next(iter(self.keys))

    def encode(self) -> bytes:
        """Return the value of the header."""
        return b" ".join([self.tag.encode(), *(id.encode() + b"=" + key.hex().encode() for id, key in self.keys.items())])


def parse(value: bytes) -> ResponseKeys:
    """Return the keys in a header. Raise ValueError for any other value."""
    match = _HEADER.fullmatch(value)
    if match is None:
        raise ValueError("must be a tag and one or two pairs ID=KEY")
    pairs = (pair.split("=") for pair in match[2].decode().split())
    return ResponseKeys(match[1].decode(), {id: bytes.fromhex(key) for id, key in pairs})


def derive_keys(secret: bytes, tenant: str, *ids: str) -> ResponseKeys:
    """Return the keys of the responses `ids` of a tenant. `secret`: at least 16 random bytes."""
    return ResponseKeys(expand(secret, b"tenant", tenant)[:16].hex(), {id: expand(secret, b"response", tenant, id) for id in ids})


def expand(secret: bytes, purpose: bytes, *context: str) -> bytes:
    """Return 32 bytes for a purpose and its context: the first block of HKDF-Expand with SHA-256."""
    parts = [part.encode() for part in context]
    info = b"fairlead-response-1 " + purpose + b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret, info + b"\x01", "sha256")


def new_id() -> str:
    """Return the id of a response to be stored. It has 128 random bits: where there are no API keys, who knows it may read the response."""
    return f"resp_{secrets.token_hex(16)}"
