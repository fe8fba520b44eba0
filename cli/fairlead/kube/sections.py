"""The sections of `fairlead explain`: one line for each fact about a part of a service. No I/O."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fairlead.kube.facts import Facts
from fairlead.kube.live import is_ready
from fairlead.kube.snapshot import ready_counts, row
from fairlead_operator import causes, names
from fairlead_operator.causes.events import newest_relevant
from fairlead_operator.objects import component_of
from fairlead_operator.observed import PodEvent

Body = Mapping[str, Any]
MOST_EVENTS = 8
_BAD_WHEN_TRUE = {"Degraded", "Stalled"}
_NEUTRAL = {"Progressing", "Reconciling"}  # a rollout is no problem, and its failure is in Degraded


@dataclass(frozen=True)
class Line:
    """One fact. `ok`: True for good, False for a problem, None for neither."""

    text: str
    ok: bool | None = None


def describe_service(facts: Facts, current: bool) -> Iterator[Line]:
    spec, status = facts.service.get("spec") or {}, facts.service.get("status") or {}
    model = (spec.get("model") or {}).get("uri")
    yield Line(f"model {model}, revision {status.get('revision') or 'none yet'}, workers {ready_counts(status)}")
    generation = facts.service["metadata"].get("generation")
    if not status.get("conditions"):
        yield Line("no status: no operator has seen this service", False)
    elif not current:
        yield Line(f"the status is of generation {status.get('observedGeneration')}, the service has generation {generation}", False)
    if status.get("url"):
        yield Line(f'clients use {status["url"]}, "model": "{status.get("modelName")}"')
    index, traffic = status.get("index") or {}, status.get("traffic") or {}
    if index:
        yield Line(
            f"index {index['state']}{': ' + index['message'] if index.get('message') else ''}",
            index["state"] in ("Available", "Disabled", "Unused"),
        )
    if index.get("credentials") in ("Shared", "None"):
        login = "one Redis login for all services" if index["credentials"] == "Shared" else "no password for Redis"
        yield Line(f"{login}: {index.get('credentialsMessage') or 'no reason given'} (docs/operate/redis-credentials.md)", False)
    if traffic:
        hits = f", {traffic['cacheHitPercent']} % of prompt tokens from caches" if traffic.get("cacheHitPercent") is not None else ""
        rates = f"{traffic.get('tokensPerSecond', 0)} tokens/s out, {traffic.get('promptTokensPerSecond', 0)} tokens/s in"
        yield Line(f"{rates}{hits} (at {traffic.get('lastUpdateTime')})")
    seen = row(facts.service, facts.pods, facts.live)
    for note in seen.notes:
        yield Line(note)
    figures = seen.figures
    if figures.running is not None:
        use = f", KV {figures.kv_use:.0%} in use" if figures.kv_use is not None else ""
        yield Line(f"{figures.running} requests running, {figures.queued or 0} waiting{use}")
    if seen.loading:
        yield Line(f"loading: {seen.loading}")


def describe_condition(one: Body, ready: Body, now: datetime) -> Line:
    wanted = "False" if one["type"] in _BAD_WHEN_TRUE else "True"
    since = f" for {_ago(one['lastTransitionTime'], now)}" if one.get("lastTransitionTime") else ""
    ok = None if one["type"] in _NEUTRAL else one["status"] == wanted
    words = "same message as Ready" if one is not ready and one.get("message") == ready.get("message") else one.get("message") or "-"
    return Line(f"{one['type']} {one['status']}{since}, {one.get('reason')}: {words}", ok)


def describe_component(facts: Facts, component: str, ready_condition: Body) -> Iterator[Line]:
    deployment = facts.deployments.get(component)
    if deployment is None:
        if not any(text.startswith("list deployments") for text in facts.unknown):
            yield Line("no Deployment: the operator has not created it, or lacks the permission (see conditions)", False)
        return
    yield _describe_counts(deployment)
    for replica_set in facts.replica_sets:
        own = (replica_set["metadata"].get("labels") or {}).get(names.COMPONENT) == component
        wants = int((replica_set.get("spec") or {}).get("replicas") or 0)
        if own and (wants or (replica_set.get("status") or {}).get("replicas")):
            observed = replica_set.get("status") or {}
            counts = f"wants {wants}, has {observed.get('replicas', 0)}, {observed.get('readyReplicas', 0)} ready"
            yield Line(f"ReplicaSet {replica_set['metadata']['name']} {counts}", int(observed.get("readyReplicas") or 0) >= wants)
    for pod in facts.pods:
        if component_of(pod) in names.pod_components(component):
            yield _describe_pod(pod, find_pod_event(facts, pod), str(ready_condition.get("message")))


def _describe_counts(deployment: Body) -> Line:
    spec, status = deployment.get("spec") or {}, deployment.get("status") or {}
    wanted, ready, updated = int(spec.get("replicas") or 0), int(status.get("readyReplicas") or 0), int(status.get("updatedReplicas") or 0)
    paused = ", paused" if spec.get("paused") else ""
    what = f"{deployment.get('kind', 'Deployment')} {deployment['metadata']['name']}"
    return Line(
        f"{what} wants {wanted}: {ready} ready, {updated} of the desired revision{paused}",
        ready >= wanted and updated >= wanted,
    )


def describe_canary(facts: Facts) -> Iterator[Line]:
    """Yield the progress of a canary and its Deployment, if there is one. The section of the workers shows its pods."""
    trial = (facts.service.get("status") or {}).get("canary") or {}
    if trial:
        share = f", {trial['trafficPercent']} % of the requests" if trial.get("trafficPercent") else ""
        yield Line(f"{trial.get('phase')}, revision {trial.get('revision')}{share}", False if trial.get("phase") == "Failed" else None)
    if (deployment := facts.deployments.get(names.CANARY)) is not None:
        yield _describe_counts(deployment)


def _describe_pod(pod: Body, event: PodEvent | None, ready_message: str) -> Line:
    """Return the line of one pod. `ready_message`: the message of condition Ready, which is not repeated."""
    name, node = pod["metadata"]["name"], (pod.get("spec") or {}).get("nodeName")
    where = f" on {node}" if node else ""
    if pod["metadata"].get("deletionTimestamp"):
        return Line(f"pod {name}{where}: terminating, ends by {pod['metadata']['deletionTimestamp']}")
    if is_ready(pod):
        return Line(f"pod {name}{where}: ready", True)
    cause = causes.find_pod_cause(pod, event)
    if cause is None:
        return Line(f"pod {name}{where}")
    words = "same message as Ready" if cause.message == ready_message else cause.message
    return Line(f"pod {name}{where}: {cause.reason}: {words}", False if cause.fault else None)


def find_pod_event(facts: Facts, pod: Body) -> PodEvent | None:
    """Return the newest event of a pod that tells why it is not ready, or None."""
    involved = ("Pod", pod["metadata"]["name"])
    events = [one for one in facts.events if (one["involvedObject"].get("kind"), one["involvedObject"].get("name")) == involved]
    return newest_relevant(events)


def describe_events(events: Iterable[Body], shown: set[str], now: datetime) -> Iterator[Line]:
    """Yield the newest warnings, each text once, without the messages of conditions (`shown`)."""
    seen: set[tuple[str, str]] = set()
    for event in sorted((one for one in events if one.get("type") == "Warning"), key=_when, reverse=True):
        words = (str(event.get("reason")), " ".join(str(event.get("message")).split()))
        if words in seen or words[1] in shown or len(seen) == MOST_EVENTS:
            continue
        seen.add(words)
        times = (event.get("series") or {}).get("count") or event.get("count") or 1
        about = f"{event['involvedObject'].get('kind')} {event['involvedObject'].get('name')}"
        ago = f"{_ago(_when(event), now)} ago" if _when(event) else "some time ago"
        yield Line(f"{ago}{f', {times} times' if times > 1 else ''}, {about}: {words[0]}: {words[1]}", False)


def _when(event: Body) -> str:
    return str((event.get("series") or {}).get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")


def describe_references(facts: Facts) -> Iterator[Line]:
    for (kind, name), body in facts.references.items():
        where = facts.why[kind, name]
        if body is None:
            yield Line(f"{kind} {name} ({where}): does not exist", False)
        elif kind == "PersistentVolumeClaim":
            phase = (body.get("status") or {}).get("phase", "?")
            modes = ", ".join((body.get("spec") or {}).get("accessModes") or [])
            size = ((body.get("status") or {}).get("capacity") or {}).get("storage", "?")
            yield Line(f"{kind} {name} ({where}): {phase}, {size}, {modes}", phase == "Bound")
        else:
            yield Line(f"{kind} {name} ({where}): exists", True)


def describe_nodes(facts: Facts) -> Iterator[Line]:
    if facts.nodes is None:
        return
    has_gpus = False
    for node in facts.nodes:
        gpus = int(((node.get("status") or {}).get("allocatable") or {}).get(facts.gpu_resource, 0))
        if not gpus:
            continue
        has_gpus = True
        name = node["metadata"]["name"]
        used = None if facts.gpus_in_use is None else facts.gpus_in_use.get(name, 0)
        spec, conditions = (
            node.get("spec") or {},
            {one["type"]: one["status"] for one in (node.get("status") or {}).get("conditions") or []},
        )
        faults = ["cordoned"] if spec.get("unschedulable") else []
        faults += ["not ready"] if conditions.get("Ready", "True") != "True" else []
        taints = [f"{one['key']}:{one['effect']}" for one in spec.get("taints") or [] if one.get("effect") != "PreferNoSchedule"]
        extra = "".join(f", {one}" for one in [*faults, *([f"taints {' '.join(taints)}"] if taints else [])])
        free = "" if used is None else f", {max(0, gpus - used)} free"
        yield Line(f"{name}: {gpus} GPUs{free}{extra}", not faults and (used is None or used < gpus))
    if not has_gpus:
        yield Line(f"no node offers {facts.gpu_resource}: does its device plugin run? To run on CPUs, set spec.resources.gpus: 0", False)


def _ago(time: str, now: datetime) -> str:
    seconds = max(0.0, (now - datetime.fromisoformat(time)).total_seconds())
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
