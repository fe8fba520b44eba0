"""Does an object need to be applied again? Only what we sent is compared, so nobody else's fields cause a write.

The API server rewrites some values (`1000m` becomes `1`), so desired and live cannot be compared directly. Instead the server's answer to
our last apply is cut down to the fields that we had sent; as long as the live object, cut down in the same way, is equal, nothing is
written. After a restart nothing is remembered, and each object is applied once: the server drops an apply that changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlead_operator.children.merge import MERGE_KEYS
from fairlead_operator.names import digest

_ABSENT = "<absent>"


@dataclass(frozen=True)
class Applied:
    """What was sent last, and what the server made of it; both as digests."""

    uid: str
    sent: str
    kept: str

    @classmethod
    def of(cls, desired: Mapping[str, Any], answer: Mapping[str, Any]) -> "Applied":
        return cls(answer["metadata"]["uid"], digest(desired), digest(shared(desired, answer)))


def needs_apply(desired: Mapping[str, Any], live: Mapping[str, Any] | None, applied: Applied | None) -> bool:
    if live is None or applied is None or applied.uid != live["metadata"]["uid"]:
        return True
    return applied.sent != digest(desired) or applied.kept != digest(shared(desired, live))


def shared(desired: Any, live: Any, field: str = "") -> Any:
    """`live`, cut down to the fields that `desired` names; a field that is not there is marked as absent."""
    if isinstance(desired, Mapping) and isinstance(live, Mapping):
        return {key: shared(value, live[key], key) if key in live else _ABSENT for key, value in desired.items()}
    key = MERGE_KEYS.get(field, "uid" if field == "ownerReferences" else "")
    if isinstance(desired, list) and isinstance(live, list) and key and all(isinstance(item, Mapping) and key in item for item in desired):
        by_key = {item.get(key): item for item in live}
        return [shared(item, by_key[item[key]]) if item[key] in by_key else _ABSENT for item in desired]
    return live
