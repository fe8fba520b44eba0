"""Refused creations: a Deployment's condition ReplicaFailure, a Job's Event, and a template that the API server refuses."""

import re
from collections.abc import Mapping
from typing import Any

from fairlead_operator.causes.cause import Cause, make_cause
from fairlead_operator.causes.fields import Fields, fields_of

PAUSED = "RolloutPaused"


_QUOTA = re.compile(r"(?:exceeded|failed) quota: ([\w.-]+)")
_REQUESTED = re.compile(r"requested: (.*?)(?:, used:|$)")
_UNSPECIFIED = re.compile(r"must specify (.+)")
_CLASSES = (
    (re.compile(r"no PriorityClass with name (\S+) was found"), "PriorityClass", "priorityClassName"),
    (re.compile(r'RuntimeClass "([^"]+)" not found'), "RuntimeClass", "runtimeClassName"),
)
_LIMIT_RANGE = re.compile(r"(?:maximum|minimum) (\S+) usage per|(\S+) max limit to request ratio per")
_ABOVE_LIMIT = re.compile(r"must be less than or equal to (\S+) limit")


def make_failure_cause(reason: str, message: str, component: str, owner: Mapping[str, Any] | None = None) -> Cause:
    """Return the cause of a pod that cannot be created: the message of the admission that refused it.

    `component`: of the pod. `owner`: the Deployment that could not create it.
    """
    template = ((owner or {}).get("spec") or {}).get("template") or {}
    fields, what = fields_of(component, template.get("spec")), f"no pod can be created: {message}"
    if quota := _QUOTA.search(message):
        return make_cause("QuotaExceeded", what, _advise_quota(quota[1], message, fields))
    if "violates PodSecurity" in message:
        do = f"Remove the named settings from {fields.template}, or label the namespace with a level that allows them."
        return make_cause("PodSecurity", what, do, template=True)
    if _is_denied(message):
        return make_cause(
            "AdmissionDenied", what, f"Change the refused part of {fields.template}, or ask the owner of that policy.", template=True
        )
    if "unable to validate against any security context constraint" in message:
        do = (
            f"Set the chart's openshift: true, and restart the pods; or remove securityContext from {fields.template}, or grant the "
            "service's ServiceAccount an SCC that allows it."
        )
        return make_cause("PodSecurity", what, do, template=True)
    if limited := _LIMIT_RANGE.search(message):
        return make_cause("LimitRange", what, _advise_limit_range(limited[1] or limited[2], fields), template=True)
    if exceeded := _ABOVE_LIMIT.search(message):
        return make_cause("LimitRange", what, _advise_limit(exceeded[1], fields), template=True)
    if "serviceaccount" in message.replace(" ", "").lower() and "not found" in message:
        do = f"Create that ServiceAccount, or remove serviceAccountName from {fields.template}."
        return make_cause(reason, what, do, template=True)
    for pattern, kind, field in _CLASSES:
        if missing := pattern.search(message):
            return make_cause(reason, what, f"Create {kind} {missing[1]}, or correct {field} in {fields.template}.", template=True)
    invalid = "is invalid:" in message
    do = f"Correct {fields.template}." if invalid else "The controller retries automatically; see kubectl describe replicaset."
    return make_cause(reason, what, do, template=invalid)


def _advise_quota(quota: str, message: str, fields: Fields) -> str:
    if unspecified := _UNSPECIFIED.search(message):
        wanted = _read_unspecified(unspecified[1])
        named = " and ".join(fields.describe(resource, container) for resource, container in wanted[:4])
        return f"ResourceQuota {quota} admits no pod without these values: set {named}, or let a LimitRange of the namespace give defaults."
    requested = _REQUESTED.search(message)
    resources = re.findall(r"([\w./-]+)=", requested[1]) if requested else []
    lower = list(dict.fromkeys(_describe_used(one, fields) for one in resources))
    if fields.count:
        lower.insert(0, fields.count)
    advice = f"Raise the ResourceQuota {quota} (kubectl describe quota)"
    lower = [one for one in lower if one]
    return f"{advice}, or lower {' or '.join(lower[:3])}." if lower else f"{advice}."


def _read_unspecified(words: str) -> list[tuple[str, str]]:
    """Return (resource, container) of `limits.cpu for: worker,proxy; limits.memory for: worker`, and of the form without containers."""
    found = []
    for part in re.split(r";", words):
        resources, _, containers = part.partition(" for: ")
        for resource in resources.split(","):
            name = resource.strip()
            name = name if "." in name else f"requests.{name}"
            found += [(name, one.strip()) for one in containers.split(",")]
    return found


def _describe_used(resource: str, fields: Fields) -> str:
    """Return the field that lowers the use of a quota's resource; empty: no field does."""
    kind, _, name = resource.rpartition(".")
    if resource in ("cpu", "memory"):
        return fields.describe(f"requests.{resource}")
    if kind in ("requests", "limits") and name in ("cpu", "memory", "ephemeral-storage"):
        return fields.describe(resource)
    return "spec.resources.gpus" if "/" in resource and fields.requests else ""


def _advise_limit_range(resource: str, fields: Fields) -> str:
    own = fields.requests or f"the resources in {fields.template}"
    do = f"Set {own} within the namespace's LimitRange (kubectl describe limitrange)"
    if resource not in ("cpu", "memory"):
        return f"{do}."
    named = dict.fromkeys(fields.describe(f"{kind}.{resource}") for kind in ("requests", "limits"))
    return f"{do}: {' and '.join(named)}."


def _advise_limit(resource: str, fields: Fields) -> str:
    """Return the advice for a request above its limit. A LimitRange gives a limit to each container without one."""
    own, request = fields.describe(f"limits.{resource}"), fields.describe(f"requests.{resource}")
    return (
        f"Set {own} to at least {request}, or lower that: without it, the default of a LimitRange of the namespace counts "
        "(kubectl describe limitrange)."
    )


def make_refusal_cause(child: str, words: str, *, component: str, template: bool) -> Cause:
    """Return the cause of a `child` ("Deployment/qwen-worker") that the API server refuses.

    `component`: of its pods. `template`: the child has pods, and the user's spec a podTemplate for them.
    """
    fields = fields_of(component)
    if template:
        return make_cause(
            "PodTemplateInvalid",
            f"{child}: {words}",
            f"Correct {fields.template}: the running pods stay unchanged until then.",
            template=True,
        )
    if _is_denied(words):
        do = "Use images and settings that the policy allows, or ask its owner. The operator retries every 30 s."
        workload = child.startswith(("Deployment/", "LeaderWorkerSet/"))
        return make_cause("AdmissionDenied" if workload else "ApplyFailed", f"{child}: {words}", do)
    if "forbidden" in words and "cannot" in words:
        do = "Grant the operator that permission: the chart's roles must be of the operator's version (helm upgrade)."
    elif quota := _QUOTA.search(words):
        do = f"Raise the ResourceQuota {quota[1]} (kubectl describe quota). The operator retries every 30 s."
    else:
        do = "The operator retries every 30 s."
    return make_cause("ApplyFailed", f"{child}: {words}", do)


def _is_denied(message: str) -> bool:
    """Return whether a policy refused the object, and not the API server itself."""
    return "admission webhook" in message or "ValidatingAdmissionPolicy" in message


def make_pause_cause(deployment: str) -> Cause:
    """Return the cause of a Deployment that a user paused: it makes no progress, and nothing else reports that."""
    return make_cause(
        PAUSED, f"Deployment {deployment} is paused", f"Resume it: kubectl rollout resume deployment/{deployment}.", fault=False
    )
