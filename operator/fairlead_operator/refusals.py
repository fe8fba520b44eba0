"""What the API server refused, as a cause that names the field to change. Pure."""

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.causes import Cause

_NO_IMAGE_VOLUMES = (
    "spec.model.uri is oci://, an image volume, and this cluster has none: it takes Kubernetes 1.31 or newer with the feature gate "
    "ImageVolume (on by default from 1.35 on); or use hf://, s3:// or pvc://"
)


def cause(service: InferenceService, child: str, words: str) -> Cause:
    """`child`: as in `Deployment/qwen-worker`; `words`: the API server's."""
    if child != f"Deployment/{names.deployment(service, names.WORKER)}":
        return Cause("ApplyFailed", f"{child}: {words}", fault=True)
    # Without the feature the server drops the volume's source, and then misses one; older servers know no such field.
    if service.spec.model.uri.startswith("oci://") and "volumes" in words:
        return Cause("PodTemplateInvalid", f"{_NO_IMAGE_VOLUMES} ({child}: {words})", fault=True)
    return Cause("PodTemplateInvalid" if service.spec.pod_template else "ApplyFailed", f"{child}: {words}", fault=True)
