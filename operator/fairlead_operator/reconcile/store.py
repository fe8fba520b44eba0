"""What the watches have shown: services, and the children of each. The newest version of an object wins, whatever its way here."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fairlead_operator.names import INSTANCE
from fairlead_operator.reconcile.difference import slim_managed_fields
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
        self._homes: dict[str, Owner] = {}  # uid of everything held → the service it is held for

    def service(self, owner: Owner) -> Body | None:
        return self._services.get(owner)

    def children(self, owner: Owner) -> Mapping[Key, Body]:
        return self._children.get(owner, {})

    def services(self) -> Iterable[Body]:
        return self._services.values()

    def put(self, body: Body) -> None:
        """Take an object in; an older version than the one held is ignored (a watch may lag behind our own writes)."""
        uid, owner = body["metadata"]["uid"], _owner(body)
        home = self._homes.get(uid)
        if home is not None and home != owner:
            # Somebody has edited the label by which a child is found: the service that loses it must see that, and put it back.
            shelf, key = self._place(home, body)
            if _version(body) <= _version(shelf[key]):
                return
            self.remove(body)
        if owner is None:
            return
        shelf, key = self._place(owner, body)
        held = shelf.get(key)
        if held is not None and _version(body) <= _version(held):
            return
        if held is not None:
            self._homes.pop(held["metadata"]["uid"], None)
        shelf[key] = _slim(body)
        self._homes[uid] = owner
        self._woken(owner)

    def remove(self, body: Body) -> None:
        """An object is gone. A successor of the same name, already held, stays."""
        home = self._homes.pop(body["metadata"]["uid"], None)
        if home is None:
            return
        shelf, key = self._place(home, body)
        del shelf[key]
        if not self._children.get(home):
            self._children.pop(home, None)
        self._woken(home)

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

    def forget(self, kind: Kind) -> None:
        """The cluster no longer serves this kind."""
        for held in self._held(kind):
            self.remove(held)

    def _place(self, owner: Owner, body: Body) -> tuple[dict[Any, Body], Any]:
        if kind_of(body) is SERVICES:
            return self._services, owner
        return self._children[owner], (body["kind"], body["metadata"]["name"])

    def _held(self, kind: Kind) -> list[Body]:
        if kind is SERVICES:
            return list(self._services.values())
        return [body for children in self._children.values() for key, body in children.items() if key[0] == kind.kind]


def _owner(body: Body) -> Owner | None:
    """The service that an object is, or that its label names."""
    metadata = body["metadata"]
    name = metadata["name"] if kind_of(body) is SERVICES else (metadata.get("labels") or {}).get(INSTANCE)
    return None if name is None else (metadata["namespace"], name)


def _version(body: Body) -> int:
    """resourceVersion as a number: of objects of one kind, the larger is the newer (KEP-5504)."""
    return int(body["metadata"]["resourceVersion"])


def _slim(body: Body) -> Body:
    """Without what nobody reads: others' managedFields are a third of every object, and of a pod only metadata and status matter."""
    metadata = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
    slim: dict[str, Any] = {**body, "metadata": metadata}
    if body["kind"] == "Pod":
        slim.pop("spec", None)
    elif kind_of(body) is not SERVICES:
        metadata["managedFields"] = slim_managed_fields(body["metadata"])
    return slim
