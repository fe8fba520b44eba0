"""Causes for which a pod has no node, from the real scheduler, and nodes that do not take their pods."""

from collections.abc import Callable
from typing import Any

from .case import Case
from .row import NOT_READY, Row

# The environment has the nodes `cpu` (no GPUs), `tainted`, `cordoned` and `small`: the last three only take pods that select them.
NODE = "kubernetes.io/hostname"


TOLERATION = {"key": "team", "operator": "Exists"}


def select(node: str, *tolerations: dict[str, str]) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"nodeSelector": {NODE: node}, "tolerations": list(tolerations)}}}


def _run_router(case: Case) -> None:
    case.run("router")


def _pending(cause: str, next_step: str, *, spec: dict[str, Any], prepare: Callable[[Case], None] = lambda case: None) -> Row:
    """Return the row of a worker that the scheduler gives no node, beside a router that runs."""
    return Row(cause, "FailedScheduling", next_step, _run_router, spec, prepare=prepare)


SCHEDULING = (
    _pending("No node has a free GPU", "Free a GPU, add a node with GPUs, or lower spec.replicas", spec={"resources": {"gpus": 1}}),
    _pending("No node has this memory", "Lower spec.resources.memory, or add a node", spec={"resources": {"memory": "9Ti"}}),
    _pending(
        "The node has a taint",
        "Tolerate the node's taints (kubectl describe node) in spec.podTemplate.spec.tolerations",
        spec=select("tainted"),
    ),
    _pending(
        "The node is cordoned", "Nodes are cordoned: kubectl uncordon NODE when they may be used again", spec=select("cordoned", TOLERATION)
    ),
    _pending(
        "The node has reached its limit of pods", "Every suitable node has reached its limit of pods: add a node", spec=select("small")
    ),
    _pending(
        "No node has the labels of `nodeSelector`",
        "No node has the required labels: correct the nodeSelector or affinity, or label a node",
        spec=select("removed", TOLERATION),
    ),
    _pending(
        "The claim of `pvc://` does not exist",
        "PersistentVolumeClaim weights, which spec.model.uri refers to, does not exist. Create it in this namespace",
        spec={"model": {"uri": "pvc://weights/qwen"}},
    ),
    _pending(
        "The claim has no volume",
        "See why the claim is not bound: kubectl describe pvc (no such StorageClass, or no volume)",
        prepare=lambda case: case.claim("weights"),
        spec={"model": {"uri": "pvc://weights/qwen"}},
    ),
    _pending(
        "The volume of the claim is on another node",
        "The claim's volume is on another node or zone: free room there, or use a claim that all nodes can mount",
        prepare=lambda case: case.claim("weights", node="removed"),
        spec={"model": {"uri": "pvc://weights/qwen"}},
    ),
    Row(
        "The ResourceClaimTemplate does not exist",
        "FailedResourceClaimCreation",
        "Create the ResourceClaimTemplate that spec.resources.resourceClaims names",
        spec={"resources": {"gpus": 1, "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h100"}]}},
    ),
    Row(
        "A queue (Kueue) holds the pods",
        "SchedulingGated",
        "A queue (such as Kueue) admits it",
        _run_router,
        spec={"podTemplate": {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}},
        event="Normal",
        alerts=(NOT_READY,),
    ),
    Row(
        "No scheduler handles the pods",
        "SchedulerNotResponding",
        "See whether the scheduler gang runs, or correct schedulerName in spec.podTemplate",
        _run_router,
        spec={"podTemplate": {"spec": {"schedulerName": "gang"}}},
    ),
    Row("The kubelet does not start the pod", "NodeNotResponding", "See whether its node is Ready (kubectl get nodes)"),
)
