"""kopf: the watches. Handlers only put what they are given into the store and wake the service's loop.

Only `on.event` and `index` handlers are used, so kopf writes nothing: no finalizer, no annotation, no status. The index functions hold
nothing; they are there because kopf calls no other handler until every indexed kind has been listed once, and a loop that had not yet
seen the pods of a running service would call it not ready.
"""

import logging
from collections.abc import Iterator
from typing import Any

import kopf

from fairlead_operator.names import FIELD_MANAGER, MANAGED_BY
from fairlead_operator.reconcile.fleet import Fleet
from fairlead_operator.reconcile.kinds import CHILDREN, SERVICES, Kind
from fairlead_operator.reconcile.store import Store


class CappedForever:
    """Delays in seconds: doubled up to a cap, for ever, and again from the start each time it is iterated."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest

    def __iter__(self) -> Iterator[float]:
        delay = self._first
        while True:
            yield delay
            delay = min(delay * 2, self._longest)


def settings() -> kopf.OperatorSettings:
    """Timeouts on everything that can hang (operator.md section 4 lists the watch deaths), and no traces on other people's objects."""
    made = kopf.OperatorSettings()
    made.peering.standalone = True
    made.scanning.disabled = True  # or the operator would need to list CRDs and namespaces
    made.posting.level = logging.WARNING
    made.posting.reporting_component = FIELD_MANAGER
    made.posting.event_name_prefix = "fairlead-"
    made.persistence.finalizer = "fairlead.dev/drain"
    made.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix="fairlead.dev")
    made.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix="fairlead.dev", key="last")
    made.watching.server_timeout = 300
    made.watching.client_timeout = 330
    made.watching.connect_timeout = 10
    made.watching.reconnect_backoff = 1
    made.watching.chunk_size = 500
    for kind in CHILDREN:
        made.watching.label_selectors[(kind.group, kind.version, kind.plural)] = f"{MANAGED_BY}=fairlead"
    made.networking.request_timeout = 30
    made.networking.connect_timeout = 10
    made.networking.error_backoffs = CappedForever(1, 30)
    made.networking.enforce_retry_after = True
    made.execution.default_backoff = 5
    made.process.ultimate_exiting_timeout = 20
    made.background.cancellation_polling = 5
    return made


def registry(store: Store, fleet: Fleet) -> kopf.OperatorRegistry:
    """All watches of the operator."""
    made = kopf.OperatorRegistry()
    kopf.on.login(registry=made)(_login)
    for kind in CHILDREN:
        _watch_children(made, kind, store)
    _watch_services(made, store, fleet)
    return made


def _login(**kwargs: Any) -> Any:
    """The pod's service account, or a kubeconfig."""
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


def _watch_children(made: kopf.OperatorRegistry, kind: Kind, store: Store) -> None:
    async def listed(body: kopf.Body, **_: Any) -> None:
        store.put(_whole(kind, body))

    async def changed(event: kopf.RawEvent, **_: Any) -> None:
        body = _whole(kind, event["object"])
        if event["type"] == "DELETED":
            store.remove(body)
        else:
            store.put(body)

    kopf.index(kind.group, kind.version, kind.plural, id=f"{kind.plural}-listed", registry=made)(listed)
    kopf.on.event(kind.group, kind.version, kind.plural, id=f"{kind.plural}-changed", registry=made)(changed)


def _watch_services(made: kopf.OperatorRegistry, store: Store, fleet: Fleet) -> None:
    async def changed(event: kopf.RawEvent, **_: Any) -> None:
        body = _whole(SERVICES, event["object"])
        if event["type"] == "DELETED":
            store.remove(body)
            return
        store.put(body)
        fleet.start((body["metadata"]["namespace"], body["metadata"]["name"]))

    kopf.on.event(SERVICES.group, SERVICES.version, SERVICES.plural, id="services-changed", registry=made)(changed)


def _whole(kind: Kind, body: Any) -> dict[str, Any]:
    """Items of a list come without apiVersion and kind."""
    return {**body, "apiVersion": kind.api_version, "kind": kind.kind}
