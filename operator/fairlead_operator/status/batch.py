"""Condition `BatchReady`: whether the Batch API is served. Pure."""

from fairlead_operator import causes, names
from fairlead_operator.api import InferenceService
from fairlead_operator.causes import Cause, creation
from fairlead_operator.observed import Observed, Replicas
from fairlead_operator.revisions import batch_revision
from fairlead_operator.status.conditions import Verdict


def judge(service: InferenceService, observed: Observed) -> tuple[Verdict | None, Cause | None]:
    """Return BatchReady, and why the batch server cannot run; None while it runs or starts, and without `spec.batch`."""
    if service.spec.batch is None:
        return None, None
    replicas = Replicas.of(observed.deployments.get(names.BATCH), 1, settled=False)
    if replicas.ready:
        return (True, "Serving", "The batch server is ready"), None
    if replicas.failure is not None:
        cause: Cause | None = creation.make_failure_cause(*replicas.failure, names.BATCH)
    else:
        cause = causes.find_worst_cause(observed.pods, names.BATCH, batch_revision(service), observed.pod_events)
    if cause is not None and cause.fault:
        return (False, cause.reason, cause.message), cause
    return (False, "Starting", "The batch server is not ready yet; files and batches are kept"), None
