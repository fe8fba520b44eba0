"""The kinds that the operator watches and writes, and their paths in the API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlead_operator.api import API_VERSION, GROUP, KIND, PLURAL, VERSION
from fairlead_operator.api.profile import PROFILE_KIND, PROFILE_PLURAL


@dataclass(frozen=True)
class Kind:
    api_version: str
    kind: str
    plural: str

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        prefix = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        return "/".join(part for part in (f"{prefix}{scope}/{self.plural}", name, subresource) if part)


SERVICES = Kind(API_VERSION, KIND, PLURAL)
PROFILES = Kind(API_VERSION, PROFILE_KIND, PROFILE_PLURAL)
PODS = Kind("v1", "Pod", "pods")
REVISIONS = Kind("apps/v1", "ControllerRevision", "controllerrevisions")
EVENTS = Kind("events.k8s.io/v1", "Event", "events")
SECRETS = Kind("v1", "Secret", "secrets")  # written, never read: see `secret_writer`
GATEWAYS = Kind("gateway.networking.k8s.io/v1", "Gateway", "gateways")  # read, never written: see `gateways`
LEASES = Kind("coordination.k8s.io/v1", "Lease", "leases")
WRITTEN = (
    Kind("v1", "ServiceAccount", "serviceaccounts"),
    Kind("v1", "Service", "services"),
    Kind("v1", "ConfigMap", "configmaps"),
    REVISIONS,
    Kind("apps/v1", "Deployment", "deployments"),
    Kind("batch/v1", "Job", "jobs"),
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
)
# Kinds that a cluster may not serve. They are watched only where it does: see `discovery`.
OPTIONAL = (
    Kind("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets"),
    Kind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes"),
    Kind("gateway.networking.k8s.io/v1", "BackendTLSPolicy", "backendtlspolicies"),
    Kind("cert-manager.io/v1", "Certificate", "certificates"),
    Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"),
    Kind("inference.networking.k8s.io/v1", "InferencePool", "inferencepools"),
)
CHILDREN = (*WRITTEN, PODS)
UNLABELLED = (SERVICES, PROFILES)  # written by users, without our labels

assert (SERVICES.group, SERVICES.version) == (GROUP, VERSION)

_BY_KIND = {(kind.api_version, kind.kind): kind for kind in (*CHILDREN, *OPTIONAL, SECRETS, SERVICES, PROFILES)}


def kind_of(body: Mapping[str, Any]) -> Kind:
    return _BY_KIND[(body["apiVersion"], body["kind"])]
