"""kopf: the watch of the services. Its handler only puts what it is given into the store, which wakes the service's loop.

Only an `on.event` handler is used, so kopf writes nothing: no finalizer, no annotation, no status. Children have watches of our own
(`watches`): kopf has a queue, a task and a record for each object, which for ten children and five pods a service is most of a start.
"""

import logging
from collections.abc import Iterator
from typing import Any

import kopf

from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.kinds import SERVICES, Kind
from fairlead_operator.names import FIELD_MANAGER

log = logging.getLogger(__name__)


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
    made.watching.chunk_size = 100  # a page stays in memory until it is worked off
    made.queueing.idle_timeout = 0.1  # a worker keeps its last event, a whole service, until it ends
    made.networking.request_timeout = 30
    made.networking.connect_timeout = 10
    made.networking.error_backoffs = CappedForever(1, 30)
    made.networking.enforce_retry_after = True
    made.execution.default_backoff = 5
    made.process.ultimate_exiting_timeout = 20
    made.background.cancellation_polling = 5
    return made


def registry(cache: Cache) -> kopf.OperatorRegistry:
    """All watches of the operator."""
    made = kopf.OperatorRegistry()
    kopf.on.login(registry=made)(_login)
    _watch_services(made, cache)
    return made


def _login(**kwargs: Any) -> Any:
    """The pod's service account, or a kubeconfig."""
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


def _watch_services(made: kopf.OperatorRegistry, cache: Cache) -> None:
    async def changed(event: kopf.RawEvent, **_: Any) -> None:
        body = _whole(SERVICES, event["object"])
        if event["type"] == "DELETED":
            cache.remove(body)
        else:
            cache.put(body)

    kopf.on.event(SERVICES.group, SERVICES.version, SERVICES.plural, id="services-changed", registry=made)(changed)


def _whole(kind: Kind, body: Any) -> dict[str, Any]:
    """Items of a list come without apiVersion and kind."""
    return {**body, "apiVersion": kind.api_version, "kind": kind.kind}
