"""Computes `controller.kubernetes.io/pod-deletion-cost`, by which the ReplicaSet controller chooses the pod to delete. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from fairlead_operator import names
from fairlead_operator.objects import Body, component_of
from fairlead_operator.scaling.demand import RouterReport, WorkerReport

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
ANSWER_TOKENS = 256
"""Assumed cost of a running answer, whose length is unknown: a pod that drains keeps its GPU until the last answer is complete."""
MAX_COST = 2**31 - 1


def deletion_costs(pods: Iterable[Body], reports: Iterable[RouterReport | None]) -> dict[str, int]:
    """Return the cost in tokens by pod name: recent cache hits, as far as no other pod holds the same KV, and the remaining work.

    Empty where no router answered. A pod that no router knows costs nothing. A pod that drains already is left out.
    """
    received = [report for report in reports if report is not None]
    if not received:
        return {}
    seen: dict[str, list[WorkerReport]] = defaultdict(list)
    for report in received:
        for worker in report.workers:
            seen[worker.pod].append(worker)
    present = [pod for pod in pods if component_of(pod) == names.WORKER and not pod["metadata"].get("deletionTimestamp")]
    return {name: worker_cost(seen[name]) if name in seen else 0 for name in (pod["metadata"]["name"] for pod in present)}


def pods_to_annotate(pods: Iterable[Body], costs: Mapping[str, int]) -> list[Body]:
    """Return the pods whose annotation differs from their cost."""
    return [pod for pod in pods if pod["metadata"]["name"] in costs and _current_cost(pod) != str(costs[pod["metadata"]["name"]])]


def worker_cost(seen: Sequence[WorkerReport]) -> int:
    """Return the cost in tokens of deleting a worker: its cache hits that no other one has, and its work. `seen`: of each router."""
    shares = [one.unique_share for one in seen if one.unique_share is not None]
    saved = sum(one.hit_tokens for one in seen) * (max(shares) if shares else 1.0)
    under_way = max(one.running + one.waiting for one in seen) * ANSWER_TOKENS
    return min(MAX_COST, round(saved + under_way + max(one.backlog_tokens for one in seen)))


def _current_cost(pod: Body) -> str | None:
    return (pod["metadata"].get("annotations") or {}).get(ANNOTATION)
