"""What the watches have shown: services, and the children of each. The newest version of an object wins, whatever its way here."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fairlead_operator.names import INSTANCE
from fairlead_operator.reconcile.kinds import SERVICES, Kind, kind_of

Body = Mapping[str, Any]
Owner = tuple[str, str]  # namespace, name of a service
Key = tuple[str, str]  # kind, name of a child


class Store:
    """`woken(owner)` is called whenever something of a service has changed."""

    def __init__(self, woken: Callable[[Owner], None]) -> None:
        self._woken = woken
        self._services: dict[Owner, Body] = {}
        self._children: dict[Owner, dict[Key, Body]] = defaultdict(dict)

    def service(self, owner: Owner) -> Body | None:
        return self._services.get(owner)

    def children(self, owner: Owner) -> Mapping[Key, Body]:
        return self._children.get(owner, {})

    def put(self, body: Body) -> None:
        """Take an object in; an older version than the one held is ignored (a watch may lag behind our own writes)."""
        place = self._place(body)
        if place is None:
            return
        shelf, key, owner = place
        held = shelf.get(key)
        if held is None or _version(body) > _version(held):
            shelf[key] = _slim(body)
            self._woken(owner)

    def remove(self, body: Body) -> None:
        """An object is gone. A successor of the same name, already held, stays."""
        place = self._place(body)
        if place is None:
            return
        shelf, key, owner = place
        held = shelf.get(key)
        if held is not None and held["metadata"]["uid"] == body["metadata"]["uid"]:
            del shelf[key]
            if not self._children.get(owner):
                self._children.pop(owner, None)
            self._woken(owner)

    def replace(self, kind: Kind, listed: Iterable[Body], version: int) -> int:
        """Make the store agree with a full list as of resourceVersion `version`. Returns how many removals the watch had missed."""
        bodies = list(listed)
        present = {body["metadata"]["uid"] for body in bodies}
        gone = [held for held in self._held(kind) if held["metadata"]["uid"] not in present and _version(held) <= version]
        for held in gone:
            self.remove(held)
        for body in bodies:
            self.put(body)
        return len(gone)

    def _place(self, body: Body) -> tuple[dict[Any, Body], Any, Owner] | None:
        metadata = body["metadata"]
        if kind_of(body) is SERVICES:
            owner = (metadata["namespace"], metadata["name"])
            return self._services, owner, owner
        instance = (metadata.get("labels") or {}).get(INSTANCE)
        if instance is None:
            return None
        owner = (metadata["namespace"], instance)
        return self._children[owner], (body["kind"], metadata["name"]), owner

    def _held(self, kind: Kind) -> list[Body]:
        if kind is SERVICES:
            return list(self._services.values())
        return [body for children in self._children.values() for key, body in children.items() if key[0] == kind.kind]


def _version(body: Body) -> int:
    """resourceVersion as a number: of objects of one kind, the larger is the newer (KEP-5504)."""
    return int(body["metadata"]["resourceVersion"])


def _slim(body: Body) -> Body:
    """Without what nobody reads: managedFields are half of every object, and of a pod only metadata and status matter."""
    metadata = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
    slim: dict[str, Any] = {**body, "metadata": metadata}
    if body["kind"] == "Pod":
        slim.pop("spec", None)
    return slim
