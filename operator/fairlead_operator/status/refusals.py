"""Turns a refusal of the API server into a cause that names the field to change. Pure."""

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.causes import Cause, creation
from fairlead_operator.causes.cause import make_cause
from fairlead_operator.children import groups


def find_cause(service: InferenceService, child: str, words: str) -> Cause:
    """Return the cause. `child`: as in `Deployment/qwen-worker`; `words`: the API server's message."""
    workers = child in (f"{kind}/{names.deployment(service, names.WORKER)}" for kind in ("Deployment", groups.KIND))
    # Without the feature gate the server drops the volume's source, and then reports it as missing. Older servers do not know the field.
    if workers and service.spec.model.uri.startswith("oci://") and "volumes" in words:
        return make_cause(
            "PodTemplateInvalid",
            f"spec.model.uri is oci://, an image volume, and this cluster has none ({child}: {words})",
            "It takes Kubernetes 1.31 or newer with the feature gate ImageVolume (on by default from 1.35); or use hf://, s3://, gs:// or pvc://.",
            template=True,
        )
    return creation.make_refusal_cause(child, words, template=workers and service.spec.pod_template is not None)
