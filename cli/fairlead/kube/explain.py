"""`fairlead explain`: why a service is not ready, from the service down to the nodes, and what to do next. No I/O."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from fairlead.kube import sections
from fairlead.kube.facts import Facts
from fairlead.kube.sections import Line
from fairlead_operator import causes, names
from fairlead_operator.causes import Cause, creation, unresponsive

Body = Mapping[str, Any]
_WAITS = {
    "RollingOut": "Nothing: it serves while pods are replaced.",
    "Scaling": "Nothing: it serves while workers are added or removed.",
    "Canary": "Nothing: it serves while a canary is tested.",
}
"""Advice for a service that serves during a step, by the reason of Progressing."""


@dataclass
class Report:
    namespace: str
    name: str
    ready: bool
    headline: str
    sections: dict[str, list[Line]] = field(default_factory=dict)
    next: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def explain(facts: Facts, now: datetime) -> Report:
    """Build the report of one service. The headline names the first cause that was found."""
    metadata, status = facts.service["metadata"], facts.service.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or []}
    ready = conditions.get("Ready", {})
    current = int(status.get("observedGeneration") or 0) >= int(metadata.get("generation") or 0)
    serves = ready.get("status") == "True" and current
    found = list(_causes(facts, now))
    report = Report(metadata["namespace"], metadata["name"], serves, _headline(facts, conditions, current, found))
    report.sections = {
        "service": list(sections.describe_service(facts, current)),
        "conditions": [sections.describe_condition(one, ready, now) for one in conditions.values()],
        "workers": list(sections.describe_component(facts, names.WORKER, ready)),
        "canary": list(sections.describe_canary(facts)),
        "routers": list(sections.describe_component(facts, names.ROUTER, ready)),
        "batch server": list(sections.describe_component(facts, names.BATCH, ready)) if names.BATCH in facts.deployments else [],
        "events": list(sections.describe_events(facts.events, {str(one.get("message")) for one in conditions.values()}, now)),
        "needs": list(sections.describe_references(facts)),
        "nodes with GPUs": list(sections.describe_nodes(facts)),
        "not known": [Line(text) for text in facts.unknown],
    }
    report.next = _next(facts, ready, current, serves, found)
    return report


def _headline(facts: Facts, conditions: Mapping[str, Body], current: bool, found: list[Cause]) -> str:
    ready = conditions.get("Ready", {})
    service = f"{facts.service['metadata']['name']} in namespace {facts.service['metadata']['namespace']}"
    if not ready:
        return f"{service} has no status: no operator has seen it"
    if not current:
        return f"{service}: the operator has not processed the last edit"
    if ready.get("status") == "True":
        fault = conditions.get("Degraded", {})
        problem = found[0].reason if found else fault.get("reason") if fault.get("status") == "True" else ""
        return f"{service} is ready" + (f", but has a problem: {problem}" if problem else "")
    return f"{service} is not ready: {found[0].reason if found else ready.get('reason')}"


def _causes(facts: Facts, now: datetime) -> Iterator[Cause]:
    """Yield what is wrong now, the deepest cause first, including causes that the status does not show yet."""
    for (kind, name), body in facts.references.items():
        if body is None:
            words = f"{kind} {name}, which {facts.why[kind, name]} refers to, does not exist. Create it in this namespace."
            yield Cause(f"{kind}Missing", words, fault=True)
    relevant = {pod["metadata"]["name"]: event for pod in facts.pods if (event := sections.find_pod_event(facts, pod)) is not None}
    parts = {names.WORKER: names.WORKER, names.CANARY: names.WORKER, names.ROUTER: names.ROUTER, names.BATCH: names.BATCH}
    for part, component in parts.items():
        deployment = facts.deployments.get(part)
        if deployment is None and part in (names.CANARY, names.BATCH):
            continue
        for one in ((deployment or {}).get("status") or {}).get("conditions") or []:
            if one["type"] == "ReplicaFailure" and one["status"] == "True":
                yield creation.make_failure_cause(one["reason"], one.get("message", ""), component, deployment)
        revision = _revision(deployment)
        cause = causes.find_worst_cause(facts.pods, component, revision, relevant)
        if cause is not None and cause.fault:
            yield cause
        if deployment is not None and (deployment.get("spec") or {}).get("paused"):
            yield creation.make_pause_cause(deployment["metadata"]["name"])
    unresponsive_cause, _ = unresponsive.find_cause(facts.deployments.values(), facts.pods, now, relevant)
    if unresponsive_cause is not None:
        yield unresponsive_cause


def _revision(deployment: Body | None) -> str:
    template = ((deployment or {}).get("spec") or {}).get("template") or {}
    return str(((template.get("metadata") or {}).get("labels") or {}).get(names.REVISION, ""))


def _next(facts: Facts, ready: Body, current: bool, serves: bool, found: list[Cause]) -> list[str]:
    name, namespace = facts.service["metadata"]["name"], facts.service["metadata"]["namespace"]
    steps = list(dict.fromkeys(cause.message for cause in found))
    faults = {cause.reason for cause in found}
    status = facts.service.get("status") or {}
    degraded: Body = next((one for one in status.get("conditions") or [] if one["type"] == "Degraded"), {})
    if degraded.get("status") == "True" and degraded.get("reason") not in faults:
        steps.insert(0, f"{degraded.get('reason')}: {degraded.get('message')}")  # only the operator knows it, such as a refused apply
    if not ready or not current:
        operator = "kubectl get deployments -A -l app.kubernetes.io/component=operator"
        steps.insert(0, f"Check that fairlead-operator runs and watches this namespace, and read its log: {operator}")
    if steps:
        return steps
    step: Body = next((one for one in status.get("conditions") or [] if one["type"] == "Progressing"), {})
    if serves and step.get("reason") in (*_WAITS, "Paused", "RolloutPaused"):
        return [f"{_WAITS.get(step['reason'], 'It serves, and a rollout is paused:')} {step.get('message')}"]
    if serves and ready.get("reason") == "Asleep":
        return ["Nothing: it has no requests. The router holds the next request until a worker runs."]
    if serves:
        return [f"Nothing: the service is ready. kubectl fairlead top -n {namespace} shows its load."]
    reason = ready.get("reason")
    read_log = f"Read the routers' log: kubectl logs -n {namespace} deployment/{name}-router"
    advice = {
        "Loading": "Wait: the model is loading (column LOADING of kubectl fairlead status).",
        "Starting": "Wait: pods are being created.",
        "RollingOut": "Wait: pods are being replaced, one after another.",
        "Probing": "Wait some seconds: the operator sends a test completion through the router.",
        "ScaledToZero": f"Scale it up: kubectl scale inferenceservices.fairlead.dev {name} -n {namespace} --replicas=1",
        "RequestFailed": read_log,
        "RouterNotReady": read_log,
    }
    return [advice.get(str(reason), str(ready.get("message") or f"kubectl describe inferenceservices.fairlead.dev {name} -n {namespace}"))]
