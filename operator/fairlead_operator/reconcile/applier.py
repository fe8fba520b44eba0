"""Server-side apply of one service's objects. Writes only what differs, and takes over no object of another owner."""

import logging
from collections.abc import Awaitable, Container, Mapping, Sequence
from functools import partial
from typing import Any

from fairlead_operator.kube.cache import Cache, Key
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.difference import LastApplied, is_written_by_us, needs_apply, with_digest
from fairlead_operator.kube.kinds import OPTIONAL, REVISIONS, SECRETS, SERVICES, WRITTEN, kind_of
from fairlead_operator.names import INSTANCE, digest
from fairlead_operator.reconcile.field_conflicts import FieldConflictTracker
from fairlead_operator.reconcile.secret_writer import SecretWriter

log = logging.getLogger(__name__)
_WRITTEN_KINDS = {kind.kind for kind in (*WRITTEN, *OPTIONAL)}


class ServiceGone(Exception):
    """The service was deleted, or replaced by another one of the same name: create nothing more for it."""


class UnknownRevision(Exception):
    """`desired` did not know a ControllerRevision that exists: compute it again."""


class Applier:
    """Applies the children of one service uid. Remembers only the API server's last answers about them (see `difference`)."""

    def __init__(self, cluster: Cluster, cache: Cache, namespace: str, name: str, uid: str) -> None:
        self._cluster = cluster
        self._cache = cache
        self._owner = (namespace, name)
        self.uid = uid
        self._applied: dict[Key, LastApplied] = {}
        self._secrets = SecretWriter(cluster)
        self.field_conflicts = FieldConflictTracker()

    async def converge(self, objects: Sequence[Mapping[str, Any]], keep: Container[str] = ()) -> dict[str, str]:
        """Apply the objects, and delete our children that are no longer wanted, except of the kinds in `keep`.

        Returns the refusals: "Kind/name" → the API server's reason.
        """
        refusals: dict[str, str] = {}
        wanted: set[Key] = set()
        for desired in objects:
            key = (desired["kind"], desired["metadata"]["name"])
            wanted.add(key)
            if desired["kind"] == SECRETS.kind:
                if refusal := await self._catch_refusal(self._secrets.write(desired, partial(self._is_mounted, objects))):
                    refusals["/".join(key)] = refusal
                continue
            applied = self._applied.get(key)
            if applied is not None and 0 < applied.version == self._cache.version(self._owner, key) and applied.sent == digest(desired):
                continue  # unchanged on both sides since the last comparison: the object is not even decompressed
            live = self._cache.child(self._owner, key)
            if live is not None and not needs_apply(desired, live, applied):
                self._applied[key] = LastApplied.of(desired, live)  # unchanged, perhaps since an earlier process applied it
                continue
            if live is not None and applied is not None and applied.sent == digest(desired):
                self.field_conflicts.record(key, desired, live)
            refusal = await self._apply(key, desired, live)
            if refusal:
                refusals["/".join(key)] = refusal
        await self._prune(wanted, keep)
        self._applied = {key: applied for key, applied in self._applied.items() if key in wanted}  # each edit has a ControllerRevision
        return refusals

    def _is_mounted(self, objects: Sequence[Mapping[str, Any]], secret: str) -> bool:
        """Return whether the live object of one of `objects` names a Secret."""
        keys = [(each["kind"], each["metadata"]["name"]) for each in objects if each["kind"] != SECRETS.kind]
        return any(repr(secret) in str(self._cache.child(self._owner, key)) for key in keys)

    async def _apply(self, key: Key, desired: Mapping[str, Any], live: Mapping[str, Any] | None) -> str:
        if live is None:
            live = await self._cluster.get(kind_of(desired), *_namespaced_name(desired))
            if live is None:
                await self._check_service_exists()
        if live is not None and not self._is_ours(live) and not self._is_orphan(live):
            if self._belongs_to_predecessor(live):
                return f"{key[0]} {key[1]} is left over from a deleted service of this name; the cluster's garbage collector removes it"
            return f"{key[0]} {key[1]} exists and does not belong to this service{_advice(live, key, self._owner[1])}"
        is_unlabelled = live is not None and key[0] == REVISIONS.kind and live["data"] != desired["data"]
        if live is not None and is_unlabelled:
            desired = {**desired, "data": live["data"]}  # the data of a ControllerRevision is immutable
        try:
            with self._cache.read() as read:
                answer = await self._cluster.apply(with_digest(desired))
                read.put(answer)
        except ApiError as refusal:
            if not refusal.permanent:
                raise
            return str(refusal)
        self._applied[key] = LastApplied.of(desired, answer)
        log.info("applied %s %s/%s", key[0], self._owner[0], key[1])
        if is_unlabelled:
            raise UnknownRevision(f"{key[0]} {key[1]} was there, without the labels by which it is found")
        return ""

    async def write_secrets(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """Write these Secrets and nothing else. Permanent refusals are logged."""
        for desired in objects:
            if refusal := await self._catch_refusal(self._secrets.write(desired)):
                log.warning("Secret %s/%s: %s", *_namespaced_name(desired), refusal)

    async def _catch_refusal(self, write: Awaitable[None]) -> str:
        """Return why the API server permanently refuses `write`; empty when it succeeded."""
        try:
            await write
        except ApiError as refusal:
            if not refusal.permanent:
                raise
            return str(refusal)
        return ""

    async def _check_service_exists(self) -> None:
        """Check that the service exists before creating a child. Raises ServiceGone.

        Without this check, a service whose deletion the watch missed would get its children back forever.
        """
        held = self._cache.service(self._owner)
        with self._cache.read() as read:
            body = await self._cluster.get(SERVICES, *self._owner)
            if body is not None:
                read.put(body)
        if body is None and held is not None:
            self._cache.remove_missing(
                held
            )  # otherwise the controller would restart the reconciler of a service that the cache still shows
        if body is None or body["metadata"]["uid"] != self.uid or body["metadata"].get("deletionTimestamp"):
            raise ServiceGone(f"{self._owner[0]}/{self._owner[1]} is gone")

    async def _prune(self, wanted: set[Key], keep: Container[str]) -> None:
        for key in self._cache.keys(self._owner):
            if key in wanted or key[0] in keep or key[0] not in _WRITTEN_KINDS:
                continue
            live = self._cache.child(self._owner, key)
            if live is None or not self._is_ours(live) or live["metadata"].get("deletionTimestamp"):
                continue
            log.info("deleting %s %s/%s, which is no longer wanted", key[0], self._owner[0], key[1])
            try:
                await self._cluster.delete(live)
            except ApiError as refusal:
                if refusal.code not in (404, 409):
                    raise

    def _is_ours(self, live: Mapping[str, Any]) -> bool:
        references = live["metadata"].get("ownerReferences") or []
        return any(reference.get("controller") and reference.get("uid") == self.uid for reference in references)

    def _is_orphan(self, live: Mapping[str, Any]) -> bool:
        """Return whether an operator made this object for a service of this name, and it has no owner now.

        A user removed the owner reference, or deleted the service with --cascade=orphan. The object is adopted, as every controller of
        Kubernetes adopts what its selector matches.
        """
        metadata = live["metadata"]
        owned = any(reference.get("controller") for reference in metadata.get("ownerReferences") or [])
        return not owned and (metadata.get("labels") or {}).get(INSTANCE) == self._owner[1] and is_written_by_us(metadata)

    def _belongs_to_predecessor(self, live: Mapping[str, Any]) -> bool:
        """Return whether the object belongs to an earlier service of this name.

        An object of another service whose child has the same name (`qwen` and `qwen-workers`) does not.
        """
        wanted = (SERVICES.kind, self._owner[1])
        references = live["metadata"].get("ownerReferences") or []
        return any(reference.get("controller") and (reference.get("kind"), reference.get("name")) == wanted for reference in references)


def _advice(live: Mapping[str, Any], key: Key, service: str) -> str:
    """Return what a user can do about an object that is in the way."""
    metadata = live["metadata"]
    owners = [reference for reference in metadata.get("ownerReferences") or [] if reference.get("controller")]
    if owners:
        return f", but to {owners[0].get('kind')} {owners[0].get('name')}: give the service another name"
    if is_written_by_us(metadata):
        here = f"kubectl label -n {metadata['namespace']} {kind_of(live).plural} {key[1]} {INSTANCE}={service} --overwrite"
        return f": delete it, or have it taken over: {here}"
    return ": delete it, or give the service another name"


def _namespaced_name(body: Mapping[str, Any]) -> tuple[str, str]:
    return body["metadata"]["namespace"], body["metadata"]["name"]
