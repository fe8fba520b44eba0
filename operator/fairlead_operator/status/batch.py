"""Condition `BatchReady`: whether the Batch API is served. Pure."""

from fairlead_operator import causes, names
from fairlead_operator.api import InferenceService
from fairlead_operator.causes import Cause, creation
from fairlead_operator.observed import Observed, Replicas
from fairlead_operator.revisions import batch_revision


def build_condition(service: InferenceService, observed: Observed) -> tuple[bool, str, str] | None:
    """Return (truth, reason, message) of BatchReady; None for a service without `spec.batch`."""
    if service.spec.batch is None:
        return None
    replicas = Replicas.of(observed.deployments.get(names.BATCH), 1, settled=False)
    if replicas.ready:
        return True, "Serving", "The batch server is ready"
    cause = find_fault(service, observed)
    if cause is not None:
        return False, cause.reason, cause.message
    return False, "Starting", "The batch server is not ready yet; files and batches are kept"


def find_fault(service: InferenceService, observed: Observed) -> Cause | None:
    """Return why the batch server cannot run; None while it runs or starts."""
    if service.spec.batch is None:
        return None
    replicas = Replicas.of(observed.deployments.get(names.BATCH), 1, settled=False)
    if replicas.ready:
        return None
    if replicas.failure is not None:
        return creation.make_failure_cause(*replicas.failure, names.BATCH)
    cause = causes.find_worst_cause(observed.pods, names.BATCH, batch_revision(service), observed.pod_events)
    return cause if cause is not None and cause.fault else None
