"""Workers of more than one pod: a LeaderWorkerSet in place of the Deployment.

A group is one worker: its leader serves and is what every selector of workers finds; the followers have labels of their own, and run ranks.
Both are made from one template, the follower's from the leader's alone: so it is pinned with it, and no release of the operator changes it.
"""

from copy import deepcopy

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.children import secrets
from fairlead_operator.objects import Object
from fairlead_operator.rollout.step import Step

API_VERSION, KIND = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"
ANNOTATIONS = "leaderworkerset.sigs.k8s.io/"  # of podTemplate: for the set itself, as exclusive-topology
NOT_BELOW = 1000  # `partition` while a rollout is paused: as many groups as spec.replicas may ask for
SECRET_KEY = "secret"
_SERVES = ("ports", "startupProbe", "readinessProbe", "livenessProbe")


def grouped(service: InferenceService) -> bool:
    return service.spec.engine.nodes > 1


def components(service: InferenceService) -> tuple[str, ...]:
    """Of the pods that are workers, or parts of one."""
    return (names.WORKER, names.FOLLOWER) if grouped(service) else (names.WORKER,)


def secret(service: InferenceService) -> list[Object]:
    """Return the Secret of a service whose models span several pods; nothing for other services."""
    return [secrets.generated(service, names.nodes_secret(service), names.WORKER, SECRET_KEY)] if grouped(service) else []


def environment(service: InferenceService, revision: str) -> list[Object]:
    """Return what the pods of a group know each other by: the random value of `secret`, and the revision.

    The kubelet expands `$(NODES_SECRET)`. With the revision in it, a pod that is about to go does not join the next group.
    """
    if not grouped(service):
        return []
    source = {"secretKeyRef": {"name": names.nodes_secret(service), "key": SECRET_KEY}}
    return [
        {"name": "NODES_SECRET", "valueFrom": source},
        {"name": "FAIRLEAD_NODES_SECRET", "value": f"$(NODES_SECRET)-{revision}"},
    ]


def leader_worker_set(service: InferenceService, template: Object, step: Step) -> Object:
    """Leader and rank come to the containers from LeaderWorkerSet, as LWS_LEADER_ADDRESS and LWS_WORKER_INDEX."""
    metadata = names.metadata(service, names.deployment(service, names.WORKER), names.WORKER)
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    if chosen := {key: value for key, value in annotations.items() if key.startswith(ANNOTATIONS)}:
        metadata["annotations"] = chosen
    bounds = {**step.strategy, "partition": 0}
    if step.paused:  # a surge group would stay until the end of the rollout
        bounds = {"maxSurge": 0, "maxUnavailable": 1, "partition": NOT_BELOW}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": {
            "replicas": service.spec.wanted_replicas,
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": bounds},
            "leaderWorkerTemplate": {
                "size": service.spec.engine.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": template,
                "workerTemplate": follower(template),
            },
        },
    }


def follower(template: Object) -> Object:
    """The leader's, but that it serves nothing and is found as what it is."""
    made = deepcopy(template)
    made["metadata"]["labels"][names.COMPONENT] = names.FOLLOWER
    for container in made["spec"]["containers"]:
        if container["name"] == "worker":
            for field in _SERVES:
                container.pop(field, None)
    for spread in made["spec"].get("topologySpreadConstraints") or []:
        wanted = (spread.get("labelSelector") or {}).get("matchLabels") or {}
        if wanted.get(names.COMPONENT) == names.WORKER:
            wanted[names.COMPONENT] = names.FOLLOWER
    return made


def disruption_budget(service: InferenceService, budget: Object) -> Object:
    """Over all pods of the groups: as many pods may be evicted as groups may be away, since each takes its group with it."""
    if not grouped(service):
        return budget
    labels = {key: value for key, value in names.selector(service, names.WORKER).items() if key != names.COMPONENT}
    expression = {"key": names.COMPONENT, "operator": "In", "values": list(components(service))}
    return {**budget, "spec": {**budget["spec"], "selector": {"matchLabels": labels, "matchExpressions": [expression]}}}
