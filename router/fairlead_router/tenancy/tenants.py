"""Tenants and their API keys, parsed from the key file. An invalid file is refused as a whole.

A key is 256 random bits, so its SHA-256 is enough to keep it secret. Slow hashes protect passwords chosen by people, and would cost every
request milliseconds. Keys are looked up by digest, so timing reveals nothing about how close a guess was.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import yaml
from msgspec import Meta

from fairlead_index.salts import cache_salt

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
"""Safe in a header, a log and a metric's label."""
Priority = Annotated[int, Meta(ge=-1000, le=1000)]
LOWEST = 1000
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's takes 8 ms for 200 keys, Python's 44."""
MIN_SECRET = 32


class KeyFileError(ValueError):
    """The key file is invalid. The message says where and why, without any of its values."""


class _Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    name: Name = "key"
    priority: Priority | None = None
    slo_class: Name | None = None


class _Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    keys: list[_Key]
    tokens_per_minute: Annotated[int, Meta(ge=1)] | None = None
    burst_tokens: Annotated[int, Meta(ge=1)] | None = None
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    priority: Priority = 0
    salt: Name | None = None
    slo_class: Name | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    salt_secret: Annotated[str, Meta(min_length=MIN_SECRET)]
    tenants: dict[Name, _Tenant]


@dataclass(frozen=True, slots=True)
class Tenant:
    """Tenant. `rate`: tokens per second, 0: unlimited. `burst`: capacity of the token bucket."""

    name: str = ""
    rate: float = 0.0
    burst: float = 0.0
    weight: float = 1.0
    group: str = ""
    """Tenants of one group share cached KV."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Owner of one API key. `priority`: default and most urgent priority of its requests; lower goes first."""

    tenant: Tenant = field(default_factory=Tenant)
    key: str = ""
    priority: int = -(2**31)
    secret: bytes = field(default=b"", repr=False)
    slo_class: str = ""
    """Service class of requests that name none, and the most urgent one that they can name; empty: none was given."""

    def salt(self, given: str) -> str:
        """Return the cache salt of its requests, given the client's own `cache_salt`."""
        return cache_salt(self.secret, self.tenant.group, given)

    def session(self, given: str) -> str:
        """Return the session key for routing. Tenants' sessions never coincide."""
        return f"{self.tenant.name}/{given}" if given and self.tenant.name else given

    def effective_priority(self, requested: int | None) -> int:
        """Return a request's priority: `requested` without API keys, else at most as urgent as the key's."""
        if not self.tenant.name:
            return max(self.priority, requested or 0)
        return min(LOWEST, max(self.priority, self.priority if requested is None else requested))


ANONYMOUS = Caller()
"""Caller of all requests where there are no API keys."""


def read_credential(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the key from `Authorization: Bearer KEY`, else from `x-api-key`. Names are in lower case."""
    bearer = key = b""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            bearer = token.strip() if scheme.lower() == b"bearer" else b""
        elif name == b"x-api-key":
            key = value.strip()
    return bearer or key


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_keys(text: bytes, classes: Collection[str] | None = None) -> Mapping[bytes, Caller]:
    """Return the callers by key digest. `classes`: names of the service classes; None: not checked. Raises KeyFileError."""
    try:
        file = msgspec.convert(yaml.load(text, _LOADER), _File)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the error's own text quotes the file
        raise KeyFileError(f"it is not YAML{f', line {mark.line + 1}' if mark else ''}") from None
    except Exception as error:  # PyYAML raises whatever its constructors stumble over: AttributeError for `!!timestamp x`
        raise KeyFileError(_without_values(error)) from None
    secret = file.salt_secret.encode()
    callers: dict[bytes, Caller] = {}
    for name, entry in file.tenants.items():
        rate = (entry.tokens_per_minute or 0) / 60
        burst = float(entry.burst_tokens or entry.tokens_per_minute or 0)
        group = f"salt:{entry.salt}" if entry.salt else f"tenant:{name}"
        tenant = Tenant(name, rate, burst, entry.weight, group)
        for key in entry.keys:
            hashed = bytes.fromhex(key.sha256)
            if hashed in callers:
                raise KeyFileError(
                    f"key {key.name} of tenant {name} is key {callers[hashed].key} of tenant {callers[hashed].tenant.name} too"
                )
            slo_class = key.slo_class or entry.slo_class or ""
            if slo_class and classes is not None and slo_class not in classes:
                raise KeyFileError(f"sloClass of key {key.name} of tenant {name} is none of the service's classes: {', '.join(classes)}")
            priority = entry.priority if key.priority is None else key.priority
            callers[hashed] = Caller(tenant, key.name, priority, secret, slo_class)
    return callers


def _without_values(error: Exception) -> str:
    """Return the error's text without values. msgspec's messages hold none; of other errors only the type is given."""
    return str(error) if isinstance(error, msgspec.ValidationError) else f"it cannot be read ({type(error).__name__})"
