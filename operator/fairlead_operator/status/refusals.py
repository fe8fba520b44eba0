"""Turns a refusal of the API server into a cause that names the field to change. Pure."""

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.pod_template import PodTemplate
from fairlead_operator.causes import Cause, creation
from fairlead_operator.causes.cause import make_cause
from fairlead_operator.kube.kinds import DEPLOYMENTS, WORKER_SETS

_WITH_WORKERS = (DEPLOYMENTS.kind, WORKER_SETS.kind)


def find_cause(service: InferenceService, child: str, words: str) -> Cause:
    """Return the cause. `child`: as in `Deployment/qwen-worker`; `words`: the API server's message."""
    workers = child in (f"{kind}/{names.deployment(service, names.WORKER)}" for kind in _WITH_WORKERS)
    # Without the feature gate the server drops the volume's source, and then reports it as missing. Older servers do not know the field.
    if workers and service.spec.model.uri.startswith("oci://") and "volumes" in words:
        return make_cause(
            "PodTemplateInvalid",
            f"spec.model.uri is oci://, an image volume, and this cluster has none ({child}: {words})",
            "It takes Kubernetes 1.31 or newer with the feature gate ImageVolume (on by default from 1.35); or use hf://, s3://, gs:// or pvc://.",
            template=True,
        )
    component, template = _find_template(service, child)
    return creation.make_refusal_cause(child, words, component=component, template=template is not None)


def _find_template(service: InferenceService, child: str) -> tuple[str, PodTemplate | None]:
    """Return the component whose pods the child has, and the template that the user merges into them."""
    spec, kind, name = service.spec, *child.split("/", 1)
    if kind == "Job":
        return names.PREFETCH, spec.pod_template
    if kind not in _WITH_WORKERS:
        return names.WORKER, None
    if name == names.deployment(service, names.ROUTER):
        return names.ROUTER, spec.router.pod_template
    if name == names.deployment(service, names.BATCH):
        return names.BATCH, spec.batch.pod_template if spec.batch is not None else None
    return names.WORKER, spec.pod_template
