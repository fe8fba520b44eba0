"""kopf's watch of the services. Its handler puts each service into the cache, which wakes the service's reconciler.

Only an `on.event` handler is used, so kopf writes nothing: no finalizer, no annotation, no status. Children have reflectors of our own
(`kube.reflector`): kopf keeps a queue, a task and a record per object, which makes a start with ten children and five pods each 3.5 times
as long (docs/benchmarks/operator.md).
"""

import logging
from collections.abc import Iterator
from typing import Any

import kopf

from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.client import with_type
from fairlead_operator.kube.kinds import SERVICES
from fairlead_operator.names import FIELD_MANAGER

log = logging.getLogger(__name__)


class ExponentialBackoff:
    """Delays in seconds that double up to a cap. Each iteration starts again at the first delay."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest

    def __iter__(self) -> Iterator[float]:
        delay = self._first
        while True:
            yield delay
            delay = min(delay * 2, self._longest)


def build_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: a timeout for everything that can hang."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.scanning.disabled = True  # otherwise the operator would need the right to list CRDs and namespaces
    settings.posting.level = logging.WARNING
    settings.posting.reporting_component = FIELD_MANAGER
    settings.posting.event_name_prefix = "fairlead-"
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 1
    settings.watching.chunk_size = 100  # a page stays in memory until all its objects are processed
    settings.queueing.idle_timeout = 0.1  # a worker keeps its last event, a whole service, until it ends
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = ExponentialBackoff(1, 30)
    settings.networking.enforce_retry_after = True
    settings.process.ultimate_exiting_timeout = 20
    return settings


def build_registry(cache: Cache) -> kopf.OperatorRegistry:
    """Return a registry with all watches of kopf."""
    registry = kopf.OperatorRegistry()

    def log_in(**kwargs: Any) -> Any:
        """Log in with the pod's service account, or with a kubeconfig."""
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    async def put_or_remove(event: kopf.RawEvent, **_: Any) -> None:
        body = with_type(SERVICES, event["object"])
        if event["type"] == "DELETED":
            cache.remove(body)
        else:
            cache.put(body)

    kopf.on.login(registry=registry)(log_in)
    kopf.on.event(SERVICES.group, SERVICES.version, SERVICES.plural, id="services-changed", registry=registry)(put_or_remove)
    return registry
