"""Before there are fewer workers, each pod is told what it is worth: the ReplicaSet controller takes the one that is worth least."""

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
TIMEOUT = 2.0  # seconds for the routers to answer: the fleet gets smaller all the same


def scales_down(objects: Iterable[Mapping[str, Any]], observed: Observed) -> bool:
    """Whether some workers would go, and some stay."""
    for wanted in objects:
        live = observed.deployments.get(names.WORKER)
        if wanted["kind"] != "Deployment" or live is None or wanted["metadata"]["name"] != live["metadata"]["name"]:
            continue
        return bool(0 < wanted["spec"]["replicas"] < live["spec"].get("replicas", 1))
    return False


async def update_deletion_costs(cluster: Cluster, client: DemandClient, observed: Observed) -> list[Body]:
    """Write each worker pod's deletion cost where it is another than before. Returns the pods as written; never fails for a pod that has
    gone, or for a router that does not answer.
    """
    pods = [pod for pod in observed.stable.pods if component_of(pod) == names.WORKER]
    reports = await asyncio.gather(*(_ask(client, address) for address in ready_routers(observed.pods)))
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


async def _ask(client: DemandClient, address: str) -> RouterReport | None:
    try:
        async with asyncio.timeout(TIMEOUT):
            return await client.ask(address, 0.0, {}, worth=True)
    except (DemandUnavailable, TimeoutError):
        return None
