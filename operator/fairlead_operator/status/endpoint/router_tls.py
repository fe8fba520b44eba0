"""Faults of the routers' certificate that no pod can report. Pure."""

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.causes import Cause
from fairlead_operator.causes.cause import make_cause
from fairlead_operator.kube.kinds import CERTIFICATES
from fairlead_operator.objects import conditions_of
from fairlead_operator.observed import Observed


def find_fault(service: InferenceService, observed: Observed) -> Cause | None:
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


def explain(obstacle: Cause | None, fault: Cause | None) -> Cause | None:
    """Return the fault where routers wait for the Secret that cert-manager is to write; `obstacle` otherwise."""
    return fault if fault is not None and obstacle is not None and obstacle.reason in ("FailedMount", "RouterNotReady") else obstacle
