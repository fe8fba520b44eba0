"""The kinds that the operator watches and writes, and their paths in the API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlead_operator import names
from fairlead_operator.api import API_VERSION, KIND, PLURAL, InferenceService
from fairlead_operator.api.profile import PROFILE_KIND, PROFILE_PLURAL
from fairlead_operator.objects import Object


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
EVENTS = Kind("events.k8s.io/v1", "Event", "events")
SECRETS = Kind("v1", "Secret", "secrets")  # written, never read: see `secret_writer`
GATEWAYS = Kind("gateway.networking.k8s.io/v1", "Gateway", "gateways")  # read, never written: see `gateways`
LEASES = Kind("coordination.k8s.io/v1", "Lease", "leases")

ACCOUNTS = Kind("v1", "ServiceAccount", "serviceaccounts")
KUBE_SERVICES = Kind("v1", "Service", "services")
CONFIG_MAPS = Kind("v1", "ConfigMap", "configmaps")
REVISIONS = Kind("apps/v1", "ControllerRevision", "controllerrevisions")
DEPLOYMENTS = Kind("apps/v1", "Deployment", "deployments")
JOBS = Kind("batch/v1", "Job", "jobs")
BUDGETS = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICIES = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
WRITTEN = (ACCOUNTS, KUBE_SERVICES, CONFIG_MAPS, REVISIONS, DEPLOYMENTS, JOBS, BUDGETS, NETWORK_POLICIES)

WORKER_SETS = Kind("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets")
ROUTES = Kind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes")
TLS_POLICIES = Kind("gateway.networking.k8s.io/v1", "BackendTLSPolicy", "backendtlspolicies")
CERTIFICATES = Kind("cert-manager.io/v1", "Certificate", "certificates")
AUTOSCALERS = Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
POOLS = Kind("inference.networking.k8s.io/v1", "InferencePool", "inferencepools")
OPTIONAL = (WORKER_SETS, ROUTES, TLS_POLICIES, CERTIFICATES, AUTOSCALERS, POOLS)
"""Kinds that a cluster may not serve. They are watched only where it does: see `discovery`."""
CHILDREN = (*WRITTEN, PODS)
UNLABELLED = (SERVICES, PROFILES)  # written by users, without our labels

_BY_KIND = {(kind.api_version, kind.kind): kind for kind in (*CHILDREN, *OPTIONAL, SECRETS, SERVICES, PROFILES)}


def kind_of(body: Mapping[str, Any]) -> Kind:
    return _BY_KIND[(body["apiVersion"], body["kind"])]


def path_of(body: Mapping[str, Any], subresource: str = "") -> str:
    metadata = body["metadata"]
    return kind_of(body).path(metadata["namespace"], metadata["name"], subresource)


def make_child(service: InferenceService, kind: Kind, name: str, component: str, **fields: Any) -> Object:
    """Return an object of the service, with the name, labels and owner of its children. `fields`: `spec`, `data` and others."""
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": names.metadata(service, name, component), **fields}
