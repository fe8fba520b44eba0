"""Sessions of browsers: a cookie that names the digest of an API key, signed with the key file's salt secret.

The cookie is not the key: it opens the console only, ends after SESSION_SECONDS, and ends at once when the key is removed. All routers of
a service accept it, because they share the key file.
"""

import base64
import binascii
import hmac
import struct
from typing import Final

SESSION_SECONDS: Final = 12 * 3600
_EXPIRY = struct.Struct(">Q")
_DIGEST_BYTES: Final = 32
_PURPOSE: Final = b"fairlead console session"


def create_token(digest: bytes, secret: bytes, now: float) -> str:
    """Return the cookie's value. `digest`: SHA-256 of the key. `now`: Unix time."""
    body = digest + _EXPIRY.pack(int(now) + SESSION_SECONDS)
    return base64.urlsafe_b64encode(body + _sign(body, secret)).decode()


def read_digest(token: str) -> bytes:
    """Return the digest that a cookie names, not yet verified; empty if it is malformed."""
    body = _decode(token)
    return body[:_DIGEST_BYTES]


def is_valid(token: str, secret: bytes, now: float) -> bool:
    """Return whether the cookie has our signature and has not expired."""
    raw = _decode(token)
    body, signature = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    return bool(raw) and hmac.compare_digest(signature, _sign(body, secret)) and now < _EXPIRY.unpack_from(body, _DIGEST_BYTES)[0]


def _sign(body: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, _PURPOSE + body, "sha256")


def _decode(token: str) -> bytes:
    try:
        raw = base64.b64decode(token, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""
    return raw if len(raw) == 2 * _DIGEST_BYTES + _EXPIRY.size else b""
