"""Models of InferenceService v1alpha1, and the CustomResourceDefinition that is generated from them.

This package imports pydantic only, so `fairlead up` can use the same models without a cluster.
"""

from fairlead_operator.api.service import InferenceService, InvalidManifest
from fairlead_operator.api.spec import ServiceSpec
from fairlead_operator.api.status import ServiceStatus

GROUP = "fairlead.dev"
VERSION = "v1alpha1"
PLURAL = "inferenceservices"
KIND = "InferenceService"
API_VERSION = f"{GROUP}/{VERSION}"

__all__ = ["API_VERSION", "GROUP", "KIND", "PLURAL", "VERSION", "InferenceService", "InvalidManifest", "ServiceSpec", "ServiceStatus"]
