"""Decides whether an object must be applied again. Only the fields that we send are compared, so other owners' fields cause no write.

The API server rewrites some values (`1000m` becomes `1`), so desired and live objects cannot be compared directly. Instead, the server's
response to our last apply is reduced to the fields that were sent. As long as the live object, reduced in the same way, is equal, nothing
is written.

After a restart the object itself provides the answer. Its annotation APPLIED is the digest of what was sent last, and `managedFields`
shows for every sent field whether we still own it: a writer that changes or removes a field takes its ownership. An object that passes
both checks is unchanged.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlead_operator.kube.merge import MERGE_KEYS
from fairlead_operator.names import FIELD_MANAGER, digest

APPLIED = "fairlead.dev/applied"
_IDENTITY = {"apiVersion", "kind", "name", "namespace"}  # never in managedFields
_ABSENT = "<absent>"
_REPLICAS = '{"f:spec":{"f:replicas":{}}}'


@dataclass(frozen=True, slots=True)
class LastApplied:
    """Digests of what was sent last, and of what the server made of it."""

    uid: str
    sent: str
    live: str
    version: int = 0  # resourceVersion at the last comparison

    @classmethod
    def of(cls, desired: Mapping[str, Any], answer: Mapping[str, Any]) -> "LastApplied":
        metadata = answer["metadata"]
        return cls(metadata["uid"], digest(desired), digest(project(desired, answer)), int(metadata.get("resourceVersion") or 0))


def with_digest(desired: Mapping[str, Any]) -> dict[str, Any]:
    """Return `desired` with its digest as annotation: what is sent."""
    metadata = desired["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED: digest(desired)}
    return {**desired, "metadata": {**metadata, "annotations": annotations}}


def is_unchanged(desired: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Return whether `live` still has exactly what an earlier process of ours sent, and whether that equals `desired`."""
    metadata = live["metadata"]
    if (metadata.get("annotations") or {}).get(APPLIED) != digest(desired):
        return False
    ours = [entry for entry in metadata.get("managedFields") or [] if _is_ours(entry)]
    sent = {key: value for key, value in desired.items() if key not in _IDENTITY}
    sent["metadata"] = {key: value for key, value in desired["metadata"].items() if key not in _IDENTITY}
    return len(ours) == 1 and _owns_all(sent, json.loads(ours[0]["fieldsV1"]))


def slim_managed_fields(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Keep our own entry, its fields as text: a tenth of the memory.

    Of other managers keep only the time of the last write (not of the status), and which one set the replicas.
    """
    entries = metadata.get("managedFields") or []
    live = [{**entry, "fieldsV1": _text(entry["fieldsV1"])} for entry in entries if _is_ours(entry)]
    live += [{**entry, "fieldsV1": _REPLICAS} for entry in entries if not _is_ours(entry) and _sets_replicas(entry)]
    others = [entry["time"] for entry in entries if not _is_ours(entry) and entry.get("time") and not entry.get("subresource")]
    return [*live, {"time": max(others)}] if others else live


def is_written_by_us(metadata: Mapping[str, Any]) -> bool:
    """Return whether an operator applied this object and still owns fields of it."""
    return any(_is_ours(entry) for entry in metadata.get("managedFields") or [])


def replicas_set_by(metadata: Mapping[str, Any]) -> str:
    """Return the field manager, other than ours, that set `spec.replicas` last; empty: none did."""
    others = [entry for entry in metadata.get("managedFields") or [] if not _is_ours(entry) and _sets_replicas(entry)]
    return str(max(others, key=lambda entry: entry.get("time") or "").get("manager") or "") if others else ""


def _sets_replicas(entry: Mapping[str, Any]) -> bool:
    fields = entry.get("fieldsV1") or {}
    fields = json.loads(fields) if isinstance(fields, str) else fields
    return "f:replicas" in (fields.get("f:spec") or {})


def _text(fields: Any) -> str:
    return fields if isinstance(fields, str) else json.dumps(fields, separators=(",", ":"))


def _is_ours(entry: Mapping[str, Any]) -> bool:
    return (entry.get("manager"), entry.get("operation"), entry.get("subresource", "")) == (FIELD_MANAGER, "Apply", "")


def _owns_all(sent: Any, fields: Mapping[str, Any]) -> bool:
    """Return whether every leaf of `sent` is in `fields` (FieldsV1: `f:` a key, `k:` an item by its keys, `v:` an item of a set)."""
    if not fields:
        return True  # a leaf, or owned as a whole
    if isinstance(sent, Mapping):
        return all(f"f:{key}" in fields and _owns_all(value, fields[f"f:{key}"]) for key, value in sent.items())
    if isinstance(sent, list):
        items = [(json.loads(name[2:]), name[0], inner) for name, inner in fields.items() if name[:2] in ("k:", "v:")]
        return all(any(_owns_item(item, *one) for one in items) for item in sent)
    return False  # a scalar has no fields below it: what is owned differs from what was sent


def _owns_item(item: Any, key: Any, how: str, inner: Mapping[str, Any]) -> bool:
    if how == "v":
        return bool(item == key)
    return isinstance(item, Mapping) and all(item.get(name, value) == value for name, value in key.items()) and _owns_all(item, inner)


def needs_apply(desired: Mapping[str, Any], live: Mapping[str, Any] | None, applied: LastApplied | None) -> bool:
    if live is None:
        return True
    if applied is None or applied.uid != live["metadata"]["uid"]:
        return not is_unchanged(desired, live)
    return applied.sent != digest(desired) or applied.live != digest(project(desired, live))


def project(desired: Any, live: Any, field: str = "") -> Any:
    """Return `live` reduced to the fields that `desired` names. A field that `live` lacks is marked as absent."""
    if isinstance(desired, Mapping) and isinstance(live, Mapping):
        return {key: project(value, live[key], key) if key in live else _ABSENT for key, value in desired.items()}
    key = MERGE_KEYS.get(field, "uid" if field == "ownerReferences" else "")
    if isinstance(desired, list) and isinstance(live, list) and key and all(isinstance(item, Mapping) and key in item for item in desired):
        by_key = {item.get(key): item for item in live}
        return [project(item, by_key[item[key]]) if item[key] in by_key else _ABSENT for item in desired]
    return live
