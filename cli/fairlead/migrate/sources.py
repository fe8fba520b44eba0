"""What a kind of source is: which objects it has, how one becomes drafts, and why fields are not carried over."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fairlead.migrate.draft import SERVER_FIELDS, Draft
from fairlead.migrate.fields import Fields

METADATA_REASONS = {
    "apiVersion": "",
    "kind": "",
    **dict.fromkeys((f"metadata.{name}" for name in ("name", "generateName", "namespace", "labels", "annotations")), ""),
    **dict.fromkeys((f"metadata.{name}" for name in SERVER_FIELDS), ""),
    "status": "",
    "spec.selector": "",
}


class OtherWorkload(Exception):
    """The object runs something else than vLLM, so that it is left out. The message says what to do."""


@dataclass
class Context:
    """All objects of the input. `used`: those that were read for another one."""

    objects: list[Mapping[str, Any]]
    used: set[int] = field(default_factory=set)

    def find(self, kinds: tuple[str, ...], matches: Callable[[Mapping[str, Any]], bool], namespace: Any) -> list[Fields]:
        """Return the objects of these kinds in the namespace that match."""
        found = []
        for number, one in enumerate(self.objects):
            same = (Fields(one).look("metadata.namespace") or namespace) == (namespace or Fields(one).look("metadata.namespace"))
            if one.get("kind") in kinds and same and matches(one):
                self.used.add(number)
                found.append(Fields(one))
        return found


@dataclass(frozen=True)
class Source:
    """`matches`: whether an object is of this kind. `convert`: reads it; raises NotMigratable and OtherWorkload."""

    kind: str
    matches: Callable[[Mapping[str, Any]], bool]
    convert: Callable[[Fields, Context], list[Draft]]
    reasons: Mapping[str, str]


def is_kind(group: str, *kinds: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return a test for objects of an API group, in each version."""
    return lambda body: body.get("kind") in kinds and str(body.get("apiVersion")).partition("/")[0] == group


def pod_metadata(draft: Draft, fields: Fields, labels: str, annotations: str, without: Mapping[str, Any] | None = None) -> None:
    """Carry over labels and annotations of pods; without those by which other objects select the old pods."""
    for kind, path in (("labels", labels), ("annotations", annotations)):
        given = fields.take(path, {})
        kept = {str(key): str(value) for key, value in given.items() if key not in (without or {}) and not _is_owned(str(key))}
        for key in [one for one in given if str(one) not in kept]:
            draft.note(f"{fields.at(path)}.{key}", "objects of the old service select by it: new pods must not have it", given[key])
        if kept:
            draft.put(f"podTemplate.metadata.{kind}", kept, fields.at(path))


def _is_owned(key: str) -> bool:
    return key.startswith(("app.kubernetes.io/", "llm-d.ai/", "serving.kserve.io/", "kserve.io/", "helm.sh/", "pod-template-hash"))


def read_gateway(draft: Draft, fields: Fields, path: str) -> None:
    """Read references to Gateways: a service has one."""
    for first in fields.items(path)[:1]:
        kept = {key: value for key in ("name", "namespace", "sectionName") if (value := first.take(key))}
        draft.put("exposure.gateway.parentRef", kept, first.path)
