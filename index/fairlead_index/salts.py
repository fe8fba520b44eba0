"""Cache salts: they separate the KV of tenants, in the index and in a worker's prefix cache.

A salt is a MAC: without the secret it cannot be computed from a tenant's name or a client's `cache_salt`.
(That shared prefix caches leak prompts through their timing: Wu et al., "I Know What You Asked", NDSS 2025; vLLM's `cache_salt`.)
"""

import hmac
from functools import lru_cache

_PERSON = b"fairlead-salt-1"


_CACHED_CHARACTERS = 256
"""Longest `cache_salt` that a worker accepts. Longer ones are not cached: a client could fill the cache with megabytes."""


def cache_salt(secret: bytes, tenant: str, given: str = "") -> str:
    """Return 32 hexadecimal digits for a tenant and its client's `cache_salt`; empty without both, for one shared cache.

    `secret`: the same in every router of a service; empty without tenants. Then a worker that gets the request directly derives the same
    salt from the client's alone.
    """
    if not tenant and not given:
        return ""
    return _cached_salt(secret, tenant, given) if len(given) <= _CACHED_CHARACTERS else _salt(secret, tenant, given)


def _salt(secret: bytes, tenant: str, given: str) -> str:
    mac = hmac.new(secret, _PERSON, "sha256")
    for field in (tenant, given):
        data = field.encode("utf-8", "surrogatepass")
        mac.update(len(data).to_bytes(4, "little"))  # length-prefixed: no two pairs share an encoding
        mac.update(data)
    return mac.hexdigest()[:32]


_cached_salt = lru_cache(4096)(_salt)  # most requests of a tenant share a salt, and the MAC is the largest cost of checking a key
