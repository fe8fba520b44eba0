"""Writes each worker pod's deletion cost before a scale-down: the ReplicaSet controller deletes the pod of the lowest cost."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from fairlead_operator import names
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.objects import Body, component_of
from fairlead_operator.observed import Observed
from fairlead_operator.polling.demand_client import DemandClient, DemandUnavailable
from fairlead_operator.scaling.costs import ANNOTATION, deletion_costs, pods_to_annotate
from fairlead_operator.scaling.demand import RouterReport
from fairlead_operator.status.index import ready_routers

log = logging.getLogger(__name__)
TIMEOUT = 2.0  # seconds for the routers to answer; the scale-down does not depend on it


def scales_down(objects: Iterable[Mapping[str, Any]], observed: Observed) -> bool:
    """Return whether some workers would be deleted and some stay."""
    for wanted in objects:
        live = observed.deployments.get(names.WORKER)
        if wanted["kind"] != "Deployment" or live is None or wanted["metadata"]["name"] != live["metadata"]["name"]:
            continue
        return bool(0 < wanted["spec"]["replicas"] < live["spec"].get("replicas", 1))
    return False


async def update_deletion_costs(cluster: Cluster, client: DemandClient, observed: Observed) -> list[Body]:
    """Write each worker pod's deletion cost where it has changed, and return the pods as written.

    A deleted pod or an unavailable router raises no error.
    """
    pods = [pod for pod in observed.stable.pods if component_of(pod) == names.WORKER]
    reports = await asyncio.gather(*(_poll(client, address) for address in ready_routers(observed.pods)))
    costs = deletion_costs(pods, reports)
    written: list[Body] = []
    for pod in pods_to_annotate(pods, costs):
        name = pod["metadata"]["name"]
        try:
            written.append(await cluster.annotate({**pod, "apiVersion": "v1", "kind": "Pod"}, {ANNOTATION: str(costs[name])}))
            log.info("pod %s/%s: deletion cost %d", pod["metadata"]["namespace"], name, costs[name])
        except ApiError as refusal:
            log.warning("pod %s/%s: its deletion cost could not be written: %s", pod["metadata"]["namespace"], name, refusal)
    return written


async def _poll(client: DemandClient, address: str) -> RouterReport | None:
    try:
        async with asyncio.timeout(TIMEOUT):
            return await client.fetch(address, 0.0, {}, with_unique_shares=True)
    except (DemandUnavailable, TimeoutError):
        return None
