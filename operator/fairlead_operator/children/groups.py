"""Workers of more than one pod: a LeaderWorkerSet in place of the Deployment.

A group is one worker. The leader serves and has the labels that select workers. The followers have their own labels and run ranks. The
follower's template is derived from the leader's alone. So both are pinned together, and a new release of the operator changes neither.
"""

from copy import deepcopy

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.children import pods, secrets
from fairlead_operator.kube.kinds import WORKER_SETS, make_child
from fairlead_operator.objects import Object
from fairlead_operator.rollout.step import Step

ANNOTATIONS = "leaderworkerset.sigs.k8s.io/"  # podTemplate annotations with this prefix go to the set, such as exclusive-topology
PAUSED_PARTITION = 1000  # `partition` while a rollout is paused: the maximum of spec.replicas
SECRET_KEY = "secret"
_SERVING_FIELDS = ("ports", "startupProbe", "readinessProbe", "livenessProbe")


def is_grouped(service: InferenceService) -> bool:
    return service.spec.engine.nodes > 1


def components(service: InferenceService) -> tuple[str, ...]:
    """Return the component labels of the worker pods, followers included."""
    return (names.WORKER, names.FOLLOWER) if is_grouped(service) else (names.WORKER,)


def secret(service: InferenceService) -> list[Object]:
    """Return the Secret of a service whose models span several pods; nothing for other services."""
    return [secrets.build_random(service, names.random_secret(service, "nodes"), names.WORKER, SECRET_KEY)] if is_grouped(service) else []


def environment(service: InferenceService, revision: str) -> list[Object]:
    """Return environment variables with which the pods of a group authenticate: the random value of `secret`, and the revision.

    The kubelet expands `$(NODES_SECRET)`. The revision keeps a pod that is about to terminate from joining the next group.
    """
    if not is_grouped(service):
        return []
    return [
        pods.secret_variable("NODES_SECRET", names.random_secret(service, "nodes"), SECRET_KEY),
        {"name": "FAIRLEAD_NODES_SECRET", "value": f"$(NODES_SECRET)-{revision}"},
    ]


def leader_worker_set(service: InferenceService, template: Object, step: Step) -> Object:
    """Return the LeaderWorkerSet. It sets LWS_LEADER_ADDRESS and LWS_WORKER_INDEX in the containers, which give leader and rank."""
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    bounds = {**step.strategy, "partition": 0}
    if step.paused:  # a surge group would stay until the end of the rollout
        bounds = {"maxSurge": 0, "maxUnavailable": 1, "partition": PAUSED_PARTITION}
    spec = {
        "replicas": service.spec.desired_replicas,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": bounds},
        "leaderWorkerTemplate": {
            "size": service.spec.engine.nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": template,
            "workerTemplate": follower_template(template),
        },
    }
    made = make_child(service, WORKER_SETS, names.deployment(service, names.WORKER), names.WORKER, spec=spec)
    if chosen := {key: value for key, value in annotations.items() if key.startswith(ANNOTATIONS)}:
        made["metadata"]["annotations"] = chosen
    return made


def follower_template(template: Object) -> Object:
    """Return the follower's template: the leader's without ports and probes, and with the follower's labels."""
    made = deepcopy(template)
    made["metadata"]["labels"][names.COMPONENT] = names.FOLLOWER
    for container in made["spec"]["containers"]:
        if container["name"] == "worker":
            for field in _SERVING_FIELDS:
                container.pop(field, None)
    for spread in made["spec"].get("topologySpreadConstraints") or []:
        wanted = (spread.get("labelSelector") or {}).get("matchLabels") or {}
        if wanted.get(names.COMPONENT) == names.WORKER:
            wanted[names.COMPONENT] = names.FOLLOWER
    return made


def count_pods(service: InferenceService, workers: int | str) -> int | str:
    """Return the pods of that many workers; a percentage is the same for both."""
    return workers * service.spec.engine.nodes if isinstance(workers, int) else workers


def disruption_budget(service: InferenceService, budget: Object) -> Object:
    """Return a budget over all pods of the groups. An evicted pod takes its group with it, so the limit on groups is a limit on pods."""
    if not is_grouped(service):
        return budget
    labels = {key: value for key, value in names.selector(service, names.WORKER).items() if key != names.COMPONENT}
    expression = {"key": names.COMPONENT, "operator": "In", "values": list(components(service))}
    return {**budget, "spec": {**budget["spec"], "selector": {"matchLabels": labels, "matchExpressions": [expression]}}}
