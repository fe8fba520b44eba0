"""`status.routers`, and faults of the routers that no pod can report: of their certificate, and of the models of other services. Pure."""

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.status import RoutersStatus
from fairlead_operator.causes import Cause
from fairlead_operator.causes.cause import make_cause
from fairlead_operator.kube.kinds import AUTOSCALERS, CERTIFICATES
from fairlead_operator.objects import conditions_of
from fairlead_operator.observed import Observed, Replicas

OTHER_SERVICE = "OtherServiceUnusable"


def build_status(service: InferenceService, observed: Observed, routers: Replicas) -> RoutersStatus:
    return RoutersStatus(
        desired_replicas=routers.desired,
        replicas=routers.total,
        ready_replicas=routers.ready,
        message=_describe_autoscaler(service, observed)[:256],
    )


def _describe_autoscaler(service: InferenceService, observed: Observed) -> str:
    """Return why the number of routers does not follow their load; empty: it does, or no autoscaler is wanted."""
    if service.spec.router.autoscaling is None:
        return ""
    if AUTOSCALERS.kind not in observed.served:
        return f"spec.router.autoscaling needs {AUTOSCALERS.api_version}, which this cluster does not serve: the number stays"
    conditions = conditions_of(observed.optional_objects.get(AUTOSCALERS.kind))
    for type_ in ("AbleToScale", "ScalingActive"):
        if (conditions.get(type_) or {}).get("status") == "False":
            return f"{conditions[type_].get('reason', type_)}: {conditions[type_].get('message', '')}"
    return ""


def find_certificate_fault(service: InferenceService, observed: Observed) -> Cause | None:
    """Return why cert-manager does not issue the certificate; None: it does, has not answered yet, or is not asked."""
    tls = service.spec.router.tls
    if tls is None or tls.issuer_ref is None:
        return None
    if CERTIFICATES.kind not in observed.served:
        what = "spec.router.tls.issuerRef needs cert-manager (Certificate of cert-manager.io/v1), which this cluster does not serve"
        return make_cause("CertManagerMissing", what, "Install cert-manager, or name a Secret in spec.router.tls.secretName.")
    # While cert-manager works on it, condition Issuing is True. After a failure it is False, and a renewal keeps Ready True.
    failed = conditions_of(observed.optional_objects.get(CERTIFICATES.kind)).get("Issuing", {})
    if failed.get("status") != "False" or failed.get("reason") != "Failed":
        return None
    name = names.deployment(service, names.ROUTER)
    what = f"cert-manager could not issue Certificate {name}: {failed.get('message', '')}"
    return make_cause("CertificateNotIssued", what, f"See kubectl describe certificate,certificaterequest -n {service.namespace}.")


def explain_missing_secret(obstacle: Cause | None, fault: Cause | None) -> Cause | None:
    """Return the fault where routers wait for the Secret that cert-manager is to write; `obstacle` otherwise."""
    return fault if fault is not None and obstacle is not None and obstacle.reason in ("FailedMount", "RouterNotReady") else obstacle


def find_other_service_fault(service: InferenceService, observed: Observed) -> Cause | None:
    """Return which of the other services cannot be served through this endpoint; None: all can."""
    for name in service.spec.exposure.other_services:
        found = observed.other_services.get(name)
        if name == service.name:
            continue
        where = f"spec.exposure.otherServices names {name}"
        if found is None:
            return make_cause(
                OTHER_SERVICE, f"{where}, which does not exist in namespace {service.namespace}", "Create it, or remove the name."
            )
        if found.has_tls:
            return make_cause(OTHER_SERVICE, f"{where}, which serves TLS (spec.router.tls)", "Remove the name, or its spec.router.tls.")
        taken = {service.served_model_name, *(one.name for one in service.spec.model.adapters)}
        if both := sorted(taken.intersection(found.models)):
            return make_cause(OTHER_SERVICE, f"{where}, whose model {both[0]} has a name of this service", "Rename one of the two models.")
    return None
