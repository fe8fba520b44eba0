"""Causes × objects: advice names fields of the object that fails, and each field exists."""

import re
from typing import Any

import pytest
from pydantic import BaseModel
from tests.operator.support.manifests import container, pod

from fairlead_operator import causes
from fairlead_operator.api.fields import _fields, _models_of
from fairlead_operator.api.spec import ServiceSpec
from fairlead_operator.causes import creation
from fairlead_operator.observed import PodEvent

POD_SPEC = {"spec", "containers", "initContainers", "tolerations", "metadata"}
OF_ALL = {"spec.imagePullSecrets", "spec.rollout.strategy"}
OWN = {
    "worker": {"spec.podTemplate", "spec.resources", "spec.engine", "spec.replicas", "spec.model"},
    "router": {"spec.router", "spec.routing"},
    "batch": {"spec.batch", "spec.routing.image"},
    "prefetch": {"spec.podTemplate", "spec.model", "spec.engine.image", "spec.routing.image"},
}
OWN["engine"] = OWN["worker"]
"""Fields that shape the pods of each component; `engine`: of a worker with runtime VLLM or SGLang."""
WORKERS_SPEC = {"initContainers": [{"name": "engine"}], "containers": [{"name": "agent"}]}


def unscheduled(message: str) -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]}


def waits(reason: str, message: str, name: str) -> dict[str, Any]:
    return {"containerStatuses": [container({"waiting": {"reason": reason, "message": message}}, name=name)]}


UNSCHEDULED = [
    "0/3 nodes are available: 3 Insufficient cpu.",
    "0/3 nodes are available: 3 Insufficient memory.",
    "0/3 nodes are available: 3 Insufficient ephemeral-storage.",
    "0/3 nodes are available: 3 node(s) had untolerated taint {dedicated: gpu}.",
    "0/3 nodes are available: 3 node(s) had untolerated taint(s).",
    "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.",
    'persistentvolumeclaim "data" not found',
    "0/3 nodes are available: 3 node(s) didn't match pod topology spread constraints.",
]
REFUSED = [
    'pods "x" is forbidden: failed quota: team: must specify limits.cpu for: OWN; limits.memory for: OWN; requests.cpu for: OWN',
    'pods "x" is forbidden: exceeded quota: team, requested: limits.cpu=4,limits.memory=4Gi, used: limits.cpu=0, limited: limits.cpu=2',
    'pods "x" is forbidden: exceeded quota: team, requested: cpu=4, used: cpu=0, limited: cpu=2',
    'pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged',
    'admission webhook "validate.kyverno.svc" denied the request: label team is missing',
    'pods "x" is forbidden: maximum cpu usage per Container is 2, but limit is 4',
    'pods "x" is forbidden: minimum memory usage per Container is 8Gi, but request is 1Gi',
    'pods "x" is forbidden: cpu max limit to request ratio per Container is 2, but provided ratio is 40.000000',
    'Pod "x" is invalid: spec.containers[0].resources.requests: Invalid value: "8": must be less than or equal to cpu limit of 500m',
    'error looking up service account ns/own: serviceaccount "own" not found',
    'pods "x" is forbidden: no PriorityClass with name batch was found',
    'pods "x" is forbidden: pod rejected: RuntimeClass "kata" not found',
    'Pod "x" is invalid: spec.volumes[0].name: Required value',
    'pods "x" is forbidden: unable to validate against any security context constraint: [provider restricted-v2: 65532 is not in range]',
]


def messages_of(component: str) -> list[str]:
    """Return the message of each cause, for a pod of this component."""
    own = "worker" if component == "prefetch" else component
    out_of_memory = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    states: list[tuple[dict[str, Any], PodEvent | None]] = [(unscheduled(words), None) for words in UNSCHEDULED]
    states += [
        (waits("ErrImagePull", "manifest unknown: not found", own), None),
        (waits("ErrImagePull", "401 unauthorized", own), None),
        ({"containerStatuses": [container(out_of_memory, name=own)]}, None),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, None),
        (waits("ContainerCreating", "", own), PodEvent("FailedMount", 'persistentvolumeclaim "data" not found')),
    ]
    label, spec = ("worker", WORKERS_SPEC) if component == "engine" else (component, {})
    found = [causes.find_pod_cause({**pod("p", label, **state), "spec": spec}, event) for state, event in states]
    owner = {"spec": {"template": {"spec": spec}}}
    found += [creation.make_failure_cause("FailedCreate", words.replace("OWN", own), label, owner) for words in REFUSED]
    assert all(found)
    return [one.message for one in found if one is not None]


def exists(path: str) -> bool:
    parts: list[type[BaseModel]] = [ServiceSpec]
    for name in path.split(".")[1:]:
        if not parts and name in POD_SPEC:
            continue
        fields = [field for part in parts for field in _fields(part) if field[0] == name]
        if not fields:
            return False
        if name == "podTemplate":
            return all(rest in POD_SPEC for rest in path.partition("podTemplate")[2].split(".") if rest)
        parts = [model for _, annotation in fields for model in _models_of(annotation)]
    return True


@pytest.mark.parametrize("component", sorted(OWN))
def test_advice_names_fields_of_the_failing_object(component: str) -> None:
    for message in messages_of(component):
        advice = message.replace("is invalid: spec.", "")
        for path in re.findall(r"spec(?:\.[A-Za-z]+)+", advice):
            assert exists(path), f"no such field: {path} in: {message}"
            allowed = any(path == one or path.startswith(f"{one}.") for one in OWN[component] | OF_ALL)
            assert allowed, f"{path} does not shape the pods of the {component}: {message}"
        assert component != "engine" or "container worker" not in message, f"no such container: {message}"


@pytest.mark.parametrize(
    ("component", "message", "words"),
    [
        (
            "worker",
            REFUSED[0].replace("OWN", "worker"),
            r"set resources\.limits\.cpu of container worker in spec\.podTemplate.* and spec\.resources\.memory",
        ),
        (
            "router",
            REFUSED[0].replace("OWN", "router"),
            r"resources\.limits\.cpu of container router in spec\.router\.podTemplate\.spec\.containers",
        ),
        ("worker", "failed quota: q: must specify limits.cpu for: proxy", r"limits\.cpu of container proxy in spec\.podTemplate"),
        ("worker", "failed quota: q: must specify limits.cpu for: engine", r"container engine in spec\.podTemplate\.spec\.initContainers"),
        ("worker", "failed quota: q: must specify limits.cpu,requests.memory", r"limits\.cpu of.* and spec\.resources\.memory"),
        ("worker", REFUSED[8], r"Set resources\.limits\.cpu of container worker .* to at least spec\.resources\.cpu.*LimitRange"),
        ("batch", REFUSED[8], r"container batch in spec\.batch\.podTemplate"),
        ("worker", REFUSED[1], r"lower spec\.replicas or resources\.limits\.cpu of container worker in .* or spec\.resources\.memory"),
        ("prefetch", REFUSED[0].replace("OWN", "worker"), r"container worker in spec\.podTemplate\.spec\.containers"),
    ],
)
def test_quotas_and_limit_ranges_have_the_field_that_they_lack(component: str, message: str, words: str) -> None:
    cause = creation.make_failure_cause("FailedCreate", message, component)
    assert re.search(words, cause.message), cause.message


@pytest.mark.parametrize(
    ("component", "name", "field"),
    [
        ("worker", "engine", "spec.engine.image"),
        ("worker", "agent", "spec.routing.image"),
        ("worker", "proxy", "container proxy in spec.podTemplate"),
        ("prefetch", "worker", "spec.engine.image (runtime VLLM or SGLang: spec.routing.image)"),
    ],
)
def test_an_image_that_does_not_exist_has_the_field_of_its_container(component: str, name: str, field: str) -> None:
    found = causes.find_pod_cause({**pod("p", component, **waits("ErrImagePull", "manifest unknown", name)), "spec": WORKERS_SPEC})
    assert found is not None and f"{field}." in found.message, found
