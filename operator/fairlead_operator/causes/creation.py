"""Refused creations: a Deployment's condition ReplicaFailure, and a template that the API server refuses."""

import re

from fairlead_operator.causes.cause import Cause, make_cause

PAUSED = "RolloutPaused"


_QUOTA = re.compile(r"(?:exceeded|failed) quota: ([\w.-]+)")
_CLASSES = (
    (re.compile(r"no PriorityClass with name (\S+) was found"), "PriorityClass", "priorityClassName"),
    (re.compile(r'RuntimeClass "([^"]+)" not found'), "RuntimeClass", "runtimeClassName"),
)


def make_failure_cause(reason: str, message: str) -> Cause:
    """Return the cause of a ReplicaFailure. Its message is that of the admission that refused the pod."""
    if quota := _QUOTA.search(message):
        do = f"Raise the ResourceQuota {quota[1]} (kubectl describe quota), or lower spec.replicas or spec.resources."
        return make_cause("QuotaExceeded", f"no pod can be created: {message}", do)
    if "violates PodSecurity" in message:
        do = "Remove the named settings from spec.podTemplate, or label the namespace with a level that allows them."
        return make_cause("PodSecurity", f"no pod can be created: {message}", do, template=True)
    if _is_denied(message):
        return make_cause(
            "AdmissionDenied",
            f"no pod can be created: {message}",
            "Change the refused part of spec.podTemplate, or ask the owner of that policy.",
            template=True,
        )
    if "LimitRange" in message or re.search(r"(?:maximum|minimum) (?:cpu|memory|\S+/\S+) usage per", message):
        return make_cause(
            "LimitRange",
            f"no pod can be created: {message}",
            "Set spec.resources within the namespace's LimitRange (kubectl describe limitrange).",
            template=True,
        )
    if "serviceaccount" in message.replace(" ", "").lower() and "not found" in message:
        return make_cause(
            reason,
            f"no pod can be created: {message}",
            "Create that ServiceAccount, or remove serviceAccountName from spec.podTemplate.",
            template=True,
        )
    for pattern, kind, field in _CLASSES:
        if missing := pattern.search(message):
            do = f"Create {kind} {missing[1]}, or correct {field} in spec.podTemplate."
            return make_cause(reason, f"no pod can be created: {message}", do, template=True)
    invalid = "is invalid:" in message
    do = "Correct spec.podTemplate." if invalid else "The controller retries automatically; see kubectl describe replicaset."
    return make_cause(reason, f"no pod can be created: {message}", do, template=invalid)


def make_refusal_cause(child: str, words: str, *, template: bool) -> Cause:
    """Return the cause of a `child` ("Deployment/qwen-worker") that the API server refuses.

    `template`: the child is the workers', and the user's spec has a podTemplate.
    """
    if template:
        return make_cause(
            "PodTemplateInvalid",
            f"{child}: {words}",
            "Correct spec.podTemplate: the running pods stay unchanged until then.",
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
