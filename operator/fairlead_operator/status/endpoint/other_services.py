"""Faults of `spec.exposure.otherServices`. Pure."""

from fairlead_operator.api import InferenceService
from fairlead_operator.causes import Cause
from fairlead_operator.causes.cause import make_cause
from fairlead_operator.observed import Observed

REASON = "OtherServiceUnusable"


def find_fault(service: InferenceService, observed: Observed) -> Cause | None:
    """Return which of the other services cannot be served through this endpoint; None: all can."""
    for name in service.spec.exposure.other_services:
        found = observed.other_services.get(name)
        if name == service.name:
            continue
        where = f"spec.exposure.otherServices names {name}"
        if found is None:
            return make_cause(REASON, f"{where}, which does not exist in namespace {service.namespace}", "Create it, or remove the name.")
        if found.has_tls:
            return make_cause(REASON, f"{where}, which serves TLS (spec.router.tls)", "Remove the name, or its spec.router.tls.")
        taken = {service.served_model_name, *(one.name for one in service.spec.model.adapters)}
        if both := sorted(taken.intersection(found.models)):
            return make_cause(REASON, f"{where}, whose model {both[0]} has a name of this service", "Rename one of the two models.")
    return None
