"""Condition `ModelCached`: whether the Job has downloaded the models of the service into its cache. Pure."""

from fairlead_operator import causes, names
from fairlead_operator.api import InferenceService
from fairlead_operator.causes import Cause, creation
from fairlead_operator.children.prefetch import is_prefetched
from fairlead_operator.objects import Body, conditions_of, has_no_pod
from fairlead_operator.observed import Observed
from fairlead_operator.status.conditions import Verdict


def judge(service: InferenceService, observed: Observed, wanted: str) -> tuple[Verdict | None, Cause | None]:
    """Return ModelCached, and why the download fails; None while it runs, and without `prefetch`. `wanted`: the name of the Job."""
    if not is_prefetched(service):
        return None, None
    job = next((one for one in observed.jobs if one["metadata"]["name"] == wanted), None)
    fault = _find_fault(observed, wanted, job)
    if conditions_of(job).get("Complete", {}).get("status") == "True":
        return (True, "Cached", f"Job {wanted} has downloaded the models"), fault
    if fault is not None:
        return (False, fault.reason, fault.message), fault
    if job is None or has_no_pod(job):
        return (False, "Starting", f"Job {wanted} has no pod yet"), None
    return (False, "Downloading", f"Job {wanted} downloads the models; see kubectl logs job/{wanted}"), None


def _find_fault(observed: Observed, wanted: str, job: Body | None) -> Cause | None:
    cause = causes.find_worst_cause(observed.pods, names.PREFETCH, wanted.rpartition("-")[2], observed.pod_events)
    if cause is not None and cause.fault:
        return cause
    refused, failed = observed.pod_events.get(wanted), conditions_of(job).get("Failed", {})
    if refused is not None and job is not None and has_no_pod(job):
        return creation.make_failure_cause(refused.reason, refused.message, names.PREFETCH)
    if failed.get("status") != "True":
        return None
    again = f"Correct spec.model, or repeat it with kubectl delete job {wanted}"
    return Cause("PrefetchFailed", f"Job {wanted} failed: {failed.get('message', '')}. {again}", fault=True)
