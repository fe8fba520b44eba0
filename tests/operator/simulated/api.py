"""The Kubernetes API in memory: server-side apply with field ownership, uids, generations, watches that may lag."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from fairlead_operator.kube.client import ApiError
from fairlead_operator.names import FIELD_MANAGER

Body = dict[str, Any]
Key = tuple[str, str]
_IDENTITY = ("apiVersion", "kind")


class Api:
    """One namespace. `now` is the common clock; `clients` receive each change, in order."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.objects: dict[Key, Body] = {}
        self._of_kind: dict[str, dict[str, Body]] = {}
        self.clients: list[Callable[[str, Body], None]] = []
        self.writes: list[tuple[float, str, Key]] = []  # of the operator
        self.mutate: Callable[[Body], None] = lambda body: None  # as an admission webhook, of what the operator applies
        self.refusals: set[str] = set()  # messages with which writes were refused, as a test wanted
        self._version = 0
        self._uids = 0

    def time(self) -> str:
        return datetime.fromtimestamp(self.now, UTC).isoformat()

    def of(self, kind: str) -> list[Body]:
        return list(self._of_kind.get(kind, {}).values())

    def put(self, body: Body, *, spec_changed: bool = False) -> Body:
        """Create or replace, as any client may."""
        key, metadata = (body["kind"], body["metadata"]["name"]), body["metadata"]
        held = self.objects.get(key)
        self._version += 1
        if held is None:
            self._uids += 1
            metadata |= {"uid": f"uid-{self._uids}", "generation": 1, "creationTimestamp": self.time(), "namespace": "default"}
        elif spec_changed:
            metadata["generation"] = held["metadata"]["generation"] + 1
        metadata["resourceVersion"] = str(self._version)
        self.objects[key] = body
        self._of_kind.setdefault(key[0], {})[key[1]] = body
        self._tell("MODIFIED", body)
        return body

    def remove(self, key: Key) -> None:
        body = self.objects.pop(key)
        del self._of_kind[key[0]][key[1]]
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        self._tell("DELETED", body)

    def collect_garbage(self) -> None:
        """Remove what belongs to an owner that is gone, a successor of its name notwithstanding. Pods go with their ReplicaSets."""
        living = {body["metadata"]["uid"] for body in self.objects.values()}
        for key, body in list(self.objects.items()):
            owners = [reference["uid"] for reference in body["metadata"].get("ownerReferences", [])]
            if owners and not living.intersection(owners):
                self.remove(key)

    def edit(self, key: Key, patch: Mapping[str, Any]) -> None:
        """A merge patch by another field manager, which then owns the changed fields."""
        body = _copy(self.objects[key])
        _merge(body, patch)
        for entry in body["metadata"].get("managedFields", []):
            _disown(entry["fieldsV1"], patch)
        self.put(body, spec_changed=body.get("spec") != self.objects[key].get("spec"))

    def _tell(self, event: str, body: Body) -> None:
        for client in self.clients:
            client(event, _copy(body))

    # What the operator's client offers (fairlead_operator.kube.client.Cluster).
    async def get(self, kind: Any, namespace: str, name: str) -> Body | None:
        return _copy(self.objects.get((kind.kind, name)))

    async def create(self, kind: Any, body: Mapping[str, Any]) -> Body:
        key = (kind.kind, body["metadata"]["name"])
        if key in self.objects:  # nothing is written
            raise ApiError(409, "exists")
        self.writes.append((self.now, "create", key))
        return _copy(self.put(_copy(dict(body))))

    async def apply(self, body: Mapping[str, Any]) -> Body:
        key = (body["kind"], body["metadata"]["name"])
        self.writes.append((self.now, "apply", key))
        held = self.objects.get(key)
        made: Body = _copy(held) if held is not None else {"metadata": {}}
        entry = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": _fields(body)}
        for before in made["metadata"].get("managedFields", []):
            _give_up(made, before["fieldsV1"], body)
        _merge(made, _copy(dict(body)))
        self.mutate(made)
        written = next(iter((held or {"metadata": {}})["metadata"].get("managedFields", [])), {})
        made["metadata"]["managedFields"] = [{**entry, "time": written.get("time")}]
        if held is not None and held == made:
            return _copy(held)
        made["metadata"]["managedFields"] = [{**entry, "time": self.time()}]
        return _copy(self.put(made, spec_changed=held is not None and held.get("spec") != made.get("spec")))

    async def patch_status(self, body: Mapping[str, Any], status: Mapping[str, Any]) -> Body:
        key = (body["kind"], body["metadata"]["name"])
        self.writes.append((self.now, "status", key))
        held = self.objects.get(key)
        if held is None or held["metadata"]["uid"] != body["metadata"]["uid"]:
            raise ApiError(404, "not found")
        if held["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise ApiError(409, "conflict")
        made = _copy(held)
        made["status"] = {}
        _merge(made["status"], status)
        return _copy(self.put(made))

    async def delete(self, body: Mapping[str, Any]) -> None:
        key = (body["kind"], body["metadata"]["name"])
        self.writes.append((self.now, "delete", key))
        held = self.objects.get(key)
        if held is None or held["metadata"]["uid"] != body["metadata"]["uid"]:
            raise ApiError(409, "another")
        self.remove(key)


def _copy(value: Any) -> Any:
    """As copy.deepcopy, in a quarter of its time: objects are JSON, and the pods' `sim`, which is shared."""
    if isinstance(value, dict):
        return {name: _copy(inner) for name, inner in value.items()}
    return [_copy(one) for one in value] if isinstance(value, list) else value


def _merge(into: Body, patch: Mapping[str, Any]) -> None:
    for name, value in patch.items():
        if value is None:
            into.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        elif isinstance(value, Mapping):
            _merge(into.setdefault(name, {}), value)
        else:
            into[name] = _copy(value)


def _fields(sent: Mapping[str, Any]) -> Body:
    """FieldsV1 of what was sent; a list is owned as a whole."""
    return {f"f:{name}": _fields(value) if isinstance(value, Mapping) else {} for name, value in sent.items() if name not in _IDENTITY}


def _disown(fields: Body, changed: Mapping[str, Any]) -> None:
    for name, value in changed.items():
        inner = fields.get(f"f:{name}")
        if inner and isinstance(value, Mapping):
            _disown(inner, value)
        if not inner:  # a leaf, or nothing is left of it
            fields.pop(f"f:{name}", None)


def _give_up(made: Body, owned: Body, sent: Any) -> None:
    """Fields that we owned and no longer send are removed."""
    for name, inner in owned.items():
        field = name[2:]
        if field not in made:
            continue
        if not isinstance(sent, Mapping) or field not in sent:
            del made[field]
        elif inner and isinstance(made[field], dict):
            _give_up(made[field], inner, sent[field])
