"""Nodes, controllers, and specs that cannot be followed."""

from typing import Any

from .case import Case, now, ready
from .row import DEGRADED, Row


def _lose_node(case: Case) -> None:
    """Report the pod as the node controller does: it gives no reason, and the containers were ready in the kubelet's last report."""
    case.serve()
    lost = {"type": "Ready", "status": "False", "lastTransitionTime": now()}
    case.report({**ready(), "conditions": [lost]})


def _evict(case: Case) -> None:
    case.report({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."})


def _reject(case: Case) -> None:
    message = "Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. Requested: 1, Available: 0"
    case.report({"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message})


def _keep_pod(case: Case) -> None:
    """Delete the worker's pod, which has a finalizer, and let the one that replaces it serve."""
    case.serve()
    name = case.placed_pod()["metadata"]["name"]
    case.patch("pods", name, {"metadata": {"finalizers": ["acme.com/backup"]}})
    case.server.request("DELETE", case.path("pods", name) + "?gracePeriodSeconds=1")
    case.run("worker")


def _scale_deployment(case: Case) -> None:
    """Point an autoscaler at the Deployment, whose fewest replicas are more than the service's."""
    case.serve()
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "qwen-worker"}
    cpu: dict[str, Any] = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}}
    spec = {"scaleTargetRef": target, "minReplicas": 2, "maxReplicas": 3, "metrics": [cpu]}
    path = f"/apis/autoscaling/v2/namespaces/{case.namespace}/horizontalpodautoscalers"
    body = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "qwen"}, "spec": spec}
    case.server.create(path, body)
    case.until(lambda: case.condition("Degraded").get("reason") == "ReplicasConflict")
    case.server.request("DELETE", f"{path}/qwen")


NODES = (
    Row("The node does not answer", "NodeLost", "If the node is gone for good, delete it: kubectl delete node", _lose_node),
    Row("The node evicts the pod", "Evicted", "Free the scarce resource on the node, or request it in spec.resources", _evict),
    Row("The node rejects the pod", "UnexpectedAdmissionError", "see the node's device plugin, or cordon the node", _reject),
    Row(
        "A pod does not terminate",
        "StuckTerminating",
        "The controllers that set its finalizers (acme.com/backup) must remove them",
        _keep_pod,
        condition="Degraded",
        status="True",
        alerts=(DEGRADED,),
    ),
    Row(
        "kube-controller-manager does not run",
        "ControllerNotResponding",
        "See whether kube-controller-manager runs",
        without_controllers=True,
    ),
    Row(
        "An autoscaler targets the Deployment",
        "ReplicasConflict",
        "point it at the InferenceService",
        _scale_deployment,
        condition="Degraded",
        status="True",
        alerts=(DEGRADED,),
    ),
)


def _name_revision(case: Case) -> None:
    case.serve()
    case.edit(rollout={"revision": "qwen-worker-0000000000"})


SPECS = (
    Row(
        "`engine.args` has a flag of the operator",
        "InvalidSpec",
        "spec.engine.args must not have --port: remove it",
        spec={"engine": {"args": ["--port=9000"]}},
    ),
    Row(
        "The profile does not exist",
        "ProfileNotFound",
        "create it there, correct the name, or remove spec.profileRef",
        spec={"profileRef": {"name": "gpu"}},
    ),
    Row(
        "`tensorParallel` is more than a node's GPUs",
        "TensorParallelUnsupported",
        "set it to 8 or less, or divide the model over more nodes",
        spec={"engine": {"tensorParallel": 16}},
    ),
    Row(
        "LeaderWorkerSet is not installed",
        "LeaderWorkerSetMissing",
        "install it as https://lws.sigs.k8s.io/docs/installation says",
        spec={"engine": {"tensorParallel": 2, "nodes": 2}},
    ),
    Row(
        "`rollout.revision` names no revision that is kept",
        "RevisionNotFound",
        "Remove it, or name one of",
        _name_revision,
        condition="Degraded",
        status="True",
        alerts=(DEGRADED,),
    ),
)
