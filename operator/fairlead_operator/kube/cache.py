"""The objects that the watches delivered: services, and the children of each. The newest version of an object wins.

Objects are kept compressed (`compression`), a hundredth of the memory of the same dicts, and are decompressed for each reconcile. With a
thousand services and five thousand pods that is the difference between 6 MiB and half a GiB.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fairlead_operator.kube.compression import CompressedObject, Compressor
from fairlead_operator.kube.difference import slim_managed_fields
from fairlead_operator.kube.kinds import AUTOSCALERS, PROFILES, SERVICES, UNLABELLED, Kind, kind_of
from fairlead_operator.names import INSTANCE
from fairlead_operator.objects import Body

Owner = tuple[str, str]  # namespace, name of a service
Key = tuple[str, str]  # kind, name of a child


class Cache:
    """Calls `on_change(owner)` whenever the service, its profile or one of its children has changed in a part that is kept."""

    def __init__(self, on_change: Callable[[Owner], None]) -> None:
        self._on_change = on_change
        self._services: dict[Owner, CompressedObject] = {}
        self._profiles: dict[Owner, CompressedObject] = {}
        self._children: dict[Owner, dict[Key, CompressedObject]] = defaultdict(dict)
        self._compressor = Compressor()
        self._owners: dict[str, Owner] = {}  # uid of each cached object → the service that it is cached under
        self._reads: set[Read] = set()  # requests that are under way

    def service(self, owner: Owner) -> Body | None:
        held = self._services.get(owner)
        return None if held is None else held.decompress()

    def exists(self, owner: Owner) -> bool:
        """Return whether the service exists and is not being deleted."""
        body = self.service(owner)
        return body is not None and not body["metadata"].get("deletionTimestamp")

    def profile(self, namespace: str, name: str) -> Body | None:
        held = self._profiles.get((namespace, name))
        return None if held is None else held.decompress()

    def keys(self, owner: Owner) -> list[Key]:
        """Return the keys of the children that exist."""
        return list(self._children.get(owner, ()))

    def child(self, owner: Owner, key: Key) -> Body | None:
        held = self._children.get(owner, {}).get(key)
        return None if held is None else held.decompress()

    def version(self, owner: Owner, key: Key) -> int:
        """Return the resourceVersion of the child; 0: there is none."""
        held = self._children.get(owner, {}).get(key)
        return 0 if held is None else held.version

    def versions(self, owner: Owner) -> dict[Key, int]:
        """Return the versions of all children. Two equal results mean that nothing changed in between."""
        return {key: held.version for key, held in self._children.get(owner, {}).items()}

    def children(self, owner: Owner, kinds: Container[str] | None = None) -> dict[Key, Body]:
        """Return all children, or those of some kinds. The caller owns the result."""
        objects = self._children.get(owner, {})
        return {key: held.decompress() for key, held in objects.items() if kinds is None or key[0] in kinds}

    def has_children_of_kind(self, kind: Kind) -> bool:
        """Return whether any service has a child of this kind."""
        return any(key[0] == kind.kind for objects in self._children.values() for key in objects)

    def owners(self) -> list[Owner]:
        """Return the keys of all services."""
        return list(self._services)

    def identities(self) -> Iterator[tuple[str, str, str]]:
        """Yield namespace, name and uid of all services, without decompressing them."""
        for (namespace, name), held in list(self._services.items()):
            yield namespace, name, held.uid

    def services(self) -> Iterator[Body]:
        for held in list(self._services.values()):
            yield held.decompress()

    @contextmanager
    def read(self) -> "Iterator[Read]":
        """Put the objects of a response into the cache with the yielded `Read`. Enter before the request is sent.

        An object may be deleted while a list is read page by page, or while the response to a write is under way. The watch may deliver
        that deletion first. Without this guard the response would put the deleted object back, and nothing would remove it again.
        """
        read = Read(self)
        self._reads.add(read)
        try:
            yield read
        finally:
            self._reads.discard(read)

    def put(self, body: Body) -> None:
        """Store an object that a watch delivered. A version older than the cached one is ignored: a watch may lag behind our own writes."""
        uid, owner = body["metadata"]["uid"], _owner(body)
        previous_owner = self._owners.get(uid)
        if previous_owner is not None and previous_owner != owner:
            # The label that names the service was edited: the service that loses the child must see that, and restore the label.
            objects, key = self._locate(previous_owner, body)
            if _version(body) <= objects[key].version:
                return
            self._drop(previous_owner, objects, key, _version(body))
        if owner is None:
            self._record_removal(uid, _version(body))
            return
        objects, key = self._locate(owner, body)
        held = objects.get(key)
        if held is not None and _version(body) <= held.version:
            return
        slim = _strip_unused(body)
        is_same = held is not None and objects is self._children.get(owner) and _is_same(held.decompress(), slim)
        if held is not None:
            self._owners.pop(held.uid, None)
        objects[key] = held = self._compressor.compress(slim, _version(body))
        self._owners[held.uid] = owner
        if not is_same:
            self._notify(owner, objects)

    def remove(self, body: Body) -> None:
        """Remove an object that a watch reports as deleted. A cached successor of the same name stays."""
        self._remove(body, _version(body))

    def remove_missing(self, body: Body) -> None:
        """Remove an object, whatever its version, because the API server answered that it does not exist."""
        self._remove(body, sys.maxsize)

    def retain(self, kind: Kind, present: Container[str], version: int, namespace: str = "") -> int:
        """Remove the objects that a full list at resourceVersion `version` lacks (`present`: its uids). Returns how many there were.

        `namespace`: the one that was listed; empty: all.
        """
        entries: list[tuple[Owner, dict[Any, CompressedObject], Any]] = [(owner, self._services, owner) for owner in self._services]
        if kind is PROFILES:
            entries = [(owner, self._profiles, owner) for owner in self._profiles]
        elif kind is not SERVICES:
            entries = [(owner, objects, key) for owner, objects in self._children.items() for key in objects if key[0] == kind.kind]
        listed = [entry for entry in entries if not namespace or entry[0][0] == namespace]
        gone = [entry for entry in listed if (held := entry[1][entry[2]]).uid not in present and held.version <= version]
        for owner, objects, key in gone:
            self._drop(owner, objects, key, version)
        return len(gone)

    def forget(self, kind: Kind) -> None:
        """Remove all objects of a kind that the cluster no longer serves."""
        self.retain(kind, (), sys.maxsize)

    def _remove(self, body: Body, version: int) -> None:
        uid = body["metadata"]["uid"]
        self._record_removal(uid, version)
        previous_owner = self._owners.get(uid)
        if previous_owner is not None:
            objects, key = self._locate(previous_owner, body)
            self._drop(previous_owner, objects, key, version)

    def _drop(self, owner: Owner, objects: dict[Any, CompressedObject], key: Any, version: int) -> None:
        """Forget a cached object as of `version`."""
        uid = objects.pop(key).uid
        self._owners.pop(uid, None)
        self._record_removal(uid, version)
        if not self._children.get(owner):
            self._children.pop(owner, None)
        self._notify(owner, objects)

    def _notify(self, owner: Owner, objects: Mapping[Any, CompressedObject]) -> None:
        """Report a change of one of `objects`: of a service, of its children, or of a profile that services name."""
        if objects is not self._profiles:
            self._on_change(owner)
            return
        namespace, name = owner
        for user in [one for one in self._services if one[0] == namespace]:
            body = self.service(user)
            if body is not None and ((body.get("spec") or {}).get("profileRef") or {}).get("name") == name:
                self._on_change(user)

    def _record_removal(self, uid: str, version: int) -> None:
        for read in self._reads:
            read.removed[uid] = max(version, read.removed.get(uid, 0))

    def _locate(self, owner: Owner, body: Body) -> tuple[dict[Any, CompressedObject], Any]:
        kind = kind_of(body)
        if kind is SERVICES:
            return self._services, owner
        if kind is PROFILES:
            return self._profiles, owner
        return self._children[owner], (kind.kind, body["metadata"]["name"])


class Read:
    """One request, from before it is sent until its response is in the cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.removed: dict[str, int] = {}
        """uid of each object that was removed since the request was sent → the version of the removal. Newer versions are put: an object
        whose label is removed and added again leaves the watch as deleted, and returns."""

    def put(self, body: Body) -> None:
        """Store an object of the response, unless it was removed after that version."""
        if _version(body) > self.removed.get(body["metadata"]["uid"], 0):
            self._cache.put(body)


def _owner(body: Body) -> Owner | None:
    """Return the service that an object is, or that its label names; of a profile its own namespace and name."""
    metadata = body["metadata"]
    name = metadata["name"] if kind_of(body) in UNLABELLED else (metadata.get("labels") or {}).get(INSTANCE)
    return None if name is None else (sys.intern(metadata["namespace"]), sys.intern(name))


def _version(body: Body) -> int:
    """Return the resourceVersion as a number: among objects of one kind the larger one is newer (KEP-5504)."""
    return int(body["metadata"]["resourceVersion"])


def _strip_unused(body: Body) -> Body:
    """Drop unused parts: other managers' fields are a third of every object, and of a pod only metadata and status are read.

    An autoscaler's metrics change every 15 s, and only conditions that are false explain why the routers do not follow their load.
    """
    metadata = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
    slim: dict[str, Any] = {**body, "metadata": metadata}
    if body["kind"] == "Pod":
        slim.pop("spec", None)
    elif kind_of(body) not in UNLABELLED:
        metadata["managedFields"] = slim_managed_fields(body["metadata"])
    if kind_of(body) is AUTOSCALERS:
        conditions = (body.get("status") or {}).get("conditions") or []
        slim["status"] = {"conditions": [one for one in conditions if one.get("status") == "False"]}
    return slim


def _is_same(held: Body, new: Body) -> bool:
    """Return whether two versions of a child differ in nothing but their resourceVersion."""
    version = {"resourceVersion": ""}
    return {**held, "metadata": {**held["metadata"], **version}} == {**new, "metadata": {**new["metadata"], **version}}
