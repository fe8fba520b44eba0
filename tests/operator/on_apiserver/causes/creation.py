"""Causes for which no pod is created: the real admission of the API server refuses it, and the real ReplicaSet controller reports that."""

from typing import Any

from .case import Case
from .row import Row

NAMESPACES, ADMISSION = "/api/v1/namespaces", "/apis/admissionregistration.k8s.io/v1"
MERGE = "application/merge-patch+json"


def _limit_pods(case: Case) -> None:
    case.post("resourcequotas", "ResourceQuota", "team", spec={"hard": {"pods": "0"}})
    case.until(lambda: (case.get("resourcequotas", "team").get("status") or {}).get("hard"))


def _limit_services(case: Case) -> None:
    case.post("resourcequotas", "ResourceQuota", "team", spec={"hard": {"services": "0"}})
    case.until(lambda: (case.get("resourcequotas", "team").get("status") or {}).get("hard"))


def _limit_memory(case: Case) -> None:
    limits = [{"type": "Container", "max": {"memory": "4Gi"}}]
    case.post("limitranges", "LimitRange", "team", spec={"limits": limits})


def _restrict(case: Case) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    code, answer = case.server.request("PATCH", f"{NAMESPACES}/{case.namespace}", {"metadata": {"labels": labels}}, MERGE)
    assert code == 200, answer


def _refuse_pods(case: Case) -> None:
    """Let a ValidatingAdmissionPolicy refuse pods of this namespace that run an image of its registry."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    spec: dict[str, Any] = {"failurePolicy": "Fail", "matchConstraints": {"resourceRules": [rule]}}
    spec["validations"] = [{"expression": "object.metadata.labels.exists(key, key == 'team')", "message": "label team is missing"}]
    policy = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy", "spec": spec}
    case.server.create(f"{ADMISSION}/validatingadmissionpolicies", {**policy, "metadata": {"name": "require-team"}})
    names = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": case.namespace}}}
    bound = {"policyName": "require-team", "validationActions": ["Deny"], "matchResources": names}
    binding = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding", "spec": bound}
    case.server.create(f"{ADMISSION}/validatingadmissionpolicybindings", {**binding, "metadata": {"name": "require-team"}})
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "try"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    pod["spec"]["automountServiceAccountToken"] = False
    case.until(lambda: case.server.request("POST", case.path("pods") + "?dryRun=All", pod)[0] == 422)  # policies take a moment to act


def _take_name(case: Case) -> None:
    case.post("services", "Service", "qwen", spec={"ports": [{"port": 80}], "selector": {"app": "another"}})


CREATION = (
    Row("A ResourceQuota of pods is used up", "QuotaExceeded", "Raise the ResourceQuota team", prepare=_limit_pods),
    Row(
        "`resources.memory` is above a LimitRange",
        "LimitRange",
        "Set spec.resources within the namespace's LimitRange",
        prepare=_limit_memory,
        spec={"resources": {"memory": "8Gi"}},
    ),
    Row(
        "Pod Security refuses `podTemplate`",
        "PodSecurity",
        "Remove the named settings from spec.podTemplate",
        prepare=_restrict,
        spec={"podTemplate": {"spec": {"hostNetwork": True}}},
    ),
    Row("An admission policy refuses the pods", "AdmissionDenied", "Change the refused part of spec.podTemplate", prepare=_refuse_pods),
    Row(
        "`podTemplate` names a PriorityClass that does not exist",
        "FailedCreate",
        "Create PriorityClass batch, or correct priorityClassName in spec.podTemplate",
        spec={"podTemplate": {"spec": {"priorityClassName": "batch"}}},
    ),
    Row(
        "`podTemplate` names a RuntimeClass that does not exist",
        "FailedCreate",
        "Create RuntimeClass kata, or correct runtimeClassName in spec.podTemplate",
        spec={"podTemplate": {"spec": {"runtimeClassName": "kata"}}},
    ),
    Row(
        "`podTemplate` has a field that Kubernetes does not know",
        "PodTemplateInvalid",
        "Correct spec.podTemplate",
        spec={"podTemplate": {"spec": {"containers": [{"name": "worker", "imagePullPolice": "Never"}]}}},
    ),
    Row("A ResourceQuota refuses the Services of the service", "ApplyFailed", "Raise the ResourceQuota team", prepare=_limit_services),
    Row("A Service of this name exists already", "ApplyFailed", "delete it, or give the service another name", prepare=_take_name),
)
