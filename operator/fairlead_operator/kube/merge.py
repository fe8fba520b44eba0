"""Merges `podTemplate` into our pod template: maps by key, lists by Kubernetes' merge key, everything else is replaced.

Scheduling constraints add up, because a replaced one would be lost without a message: tolerations and preferences are appended, and a node
must match one term of each side.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

# Field of a PodSpec → the key of its items, as in the patchMergeKey of k8s.io/api/core/v1.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "resourceClaims": "name",
    "classes": "name",
    "claims": "name",
    "topologySpreadConstraints": "topologyKey",
}
_HANDLERS = frozenset({"exec", "grpc", "httpGet", "tcpSocket"})
_NAMES = ("name",)
_CHOICES: dict[str, frozenset[str] | None] = {
    "env item": frozenset({"value", "valueFrom"}),
    "volumes item": None,  # every key but the name is a source
    "livenessProbe": _HANDLERS,
    "readinessProbe": _HANDLERS,
    "startupProbe": _HANDLERS,
}
"""Maps of which a field of these may be set once."""
_ITEM = {"env": "env item", "volumes": "volumes item"}
APPENDED = ("tolerations", "preferredDuringSchedulingIgnoredDuringExecution")


def merge(ours: Any, theirs: Any, field: str = "", *, keep_null: bool = False) -> Any:
    """Merge `theirs` over `ours`; neither is changed. null removes a key, as in a strategic merge patch.

    `keep_null`: null stays, because the result is merged over another object later.
    """
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        kept = _without_other_choice(ours, theirs, field)
        result = {key: deepcopy(value) for key, value in kept.items() if keep_null or theirs.get(key, value) is not None}
        for key, value in theirs.items():
            if value is not None:
                result[key] = merge(result.get(key), value, key, keep_null=keep_null)
            elif keep_null:
                result[key] = None
        return result
    if isinstance(ours, list) and isinstance(theirs, list) and field in APPENDED:
        return deepcopy([*ours, *(item for item in theirs if item not in ours)])
    if isinstance(ours, list) and isinstance(theirs, list) and field == "nodeSelectorTerms":
        return [_and_terms(one, other) for one in ours for other in theirs] if theirs else deepcopy(ours)
    if isinstance(ours, list) and isinstance(theirs, list) and _keyed(theirs, field) and _keyed(ours, field):
        return _merged_lists(ours, theirs, field, keep_null)
    return deepcopy(theirs)


def _keyed(items: list[Any], field: str) -> bool:
    key = MERGE_KEYS.get(field)
    return key is not None and all(isinstance(item, Mapping) and key in item for item in items)


def _merged_lists(ours: list[Any], theirs: list[Any], field: str, keep_null: bool) -> list[Any]:
    key = MERGE_KEYS[field]
    result = {item[key]: deepcopy(item) for item in ours}
    for item in theirs:
        result[item[key]] = merge(result.get(item[key]), item, _ITEM.get(field, ""), keep_null=keep_null)
    return list(result.values())


def _without_other_choice(ours: Mapping[str, Any], theirs: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return `ours` without the choice that `theirs` replaces by another one: an item may have only one of them.

    Otherwise `theirs` would need null, which `kubectl apply` removes.
    """
    of = _CHOICES.get(field)
    chosen = {key for key in theirs if key not in _NAMES} if of is None else of & set(theirs)
    if field not in _CHOICES or not chosen or chosen & set(ours):
        return ours
    return {key: value for key, value in ours.items() if key in _NAMES or (of is not None and key not in of)}


def _and_terms(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node selector term that requires both. The expressions of one term are ANDed, and terms are ORed.

    An empty term matches no node, and stays empty.
    """
    if not ours or not theirs:
        return {}
    keys = sorted({*ours, *theirs})
    return {key: deepcopy([*(ours.get(key) or []), *(theirs.get(key) or [])]) for key in keys}
