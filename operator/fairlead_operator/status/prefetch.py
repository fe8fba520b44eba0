"""Condition `ModelCached`: whether the Job has downloaded the models of the service into its cache. Pure."""

from fairlead_operator import causes, names
from fairlead_operator.api import InferenceService
from fairlead_operator.causes import Cause, creation
from fairlead_operator.children.prefetch import is_prefetched
from fairlead_operator.objects import has_no_pod
from fairlead_operator.observed import Observed


def build_condition(service: InferenceService, observed: Observed, wanted: str) -> tuple[bool, str, str] | None:
    """Return (truth, reason, message) of ModelCached; None without `spec.model.cache.prefetch`. `wanted`: the name of the Job."""
    if not is_prefetched(service):
        return None
    job = next((one for one in observed.jobs if one["metadata"]["name"] == wanted), None)
    conditions = {one["type"]: one for one in ((job or {}).get("status") or {}).get("conditions") or [] if one["status"] == "True"}
    if "Complete" in conditions:
        return True, "Cached", f"Job {wanted} has downloaded the models"
    cause = find_fault(service, observed, wanted)
    if cause is not None:
        return False, cause.reason, cause.message
    if job is None or has_no_pod(job):
        return False, "Starting", f"Job {wanted} has no pod yet"
    return False, "Downloading", f"Job {wanted} downloads the models; see kubectl logs job/{wanted}"


def find_fault(service: InferenceService, observed: Observed, wanted: str) -> Cause | None:
    """Return why the download fails; None while it runs."""
    if not is_prefetched(service):
        return None
    cause = causes.find_worst_cause(observed.pods, names.PREFETCH, wanted.rpartition("-")[2], observed.pod_events)
    if cause is not None and cause.fault:
        return cause
    refused = observed.pod_events.get(wanted)
    if refused is not None and any(job["metadata"]["name"] == wanted and has_no_pod(job) for job in observed.jobs):
        return creation.make_failure_cause(refused.reason, refused.message, names.PREFETCH)
    for job in observed.jobs:
        for one in (job.get("status") or {}).get("conditions") or []:
            if job["metadata"]["name"] == wanted and one["type"] == "Failed" and one["status"] == "True":
                again = f"Correct spec.model, or repeat it with kubectl delete job {wanted}"
                return Cause("PrefetchFailed", f"Job {wanted} failed: {one.get('message', '')}. {again}", fault=True)
    return None
