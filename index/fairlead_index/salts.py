"""Cache salts: what parts the KV of one tenant from another's, in the index and in a worker's own prefix cache.

A salt is a MAC, so that nobody who does not know the secret can name another's: neither by its tenant nor by a client's own `cache_salt`.
(That shared prefix caches leak prompts through their timing: Wu et al., "I Know What You Asked", NDSS 2025; vLLM's `cache_salt`.)
"""

import hmac
from functools import lru_cache

_PERSON = b"fairlead-salt-1"


_CACHED_CHARACTERS = 256
"""Longest `cache_salt` that a worker takes. A longer one is not cached: a client could fill the cache with megabytes."""


def cache_salt(secret: bytes, tenant: str, given: str = "") -> str:
    """32 hexadecimal digits for a tenant and what its client gave as `cache_salt`; empty where there is neither: everybody shares.

    `secret`: the same in every router of a service; empty where there are no tenants, and then a worker that is asked directly derives the
    same salt from the client's alone.
    """
    if not tenant and not given:
        return ""
    return _cached(secret, tenant, given) if len(given) <= _CACHED_CHARACTERS else _salt(secret, tenant, given)


def _salt(secret: bytes, tenant: str, given: str) -> str:
    mac = hmac.new(secret, _PERSON, "sha256")
    for field in (tenant, given):
        data = field.encode("utf-8", "surrogatepass")
        mac.update(len(data).to_bytes(4, "little"))  # length-prefixed: no two pairs share an encoding
        mac.update(data)
    return mac.hexdigest()[:32]


_cached = lru_cache(4096)(_salt)  # a tenant's requests mostly have the same, and the MAC is the dearest part of checking a key
