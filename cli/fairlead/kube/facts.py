"""The facts that `explain` needs about one service, read once. What the user may not read is listed in `unknown`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fairlead.errors import UserError
from fairlead.kube.api import METADATA_ONLY, Forbidden, Kube, NotFound
from fairlead.kube.live import Live, read_routers
from fairlead.kube.snapshot import through_proxy
from fairlead_operator import names
from fairlead_operator.api import API_VERSION, InferenceService, InvalidManifest
from fairlead_operator.api.profile import PROFILE_KIND, PROFILE_PLURAL
from fairlead_operator.api.resources import NVIDIA
from fairlead_operator.kube.kinds import WORKER_SETS
from fairlead_operator.objects import component_of
from fairlead_operator.profiles import given_fields, merge_specs, profile_name
from fairlead_operator.status import groups as group_view

Body = Mapping[str, Any]
T = TypeVar("T")


@dataclass
class Facts:
    """The facts of one service. `references`: ("Secret", name) → the object, or None if it does not exist; absent: not known."""

    service: Body
    deployments: Mapping[str, Body] = field(default_factory=dict)  # component → Deployment, or LeaderWorkerSet seen as one
    replica_sets: list[Body] = field(default_factory=list)
    pods: list[Body] = field(default_factory=list)
    events: list[Body] = field(default_factory=list)  # of the service and its objects
    references: dict[tuple[str, str], Body | None] = field(default_factory=dict)
    why: dict[tuple[str, str], str] = field(default_factory=dict)  # as `references` → the field of the manifest that refers to it
    nodes: list[Body] | None = None
    gpu_resource: str = NVIDIA  # the extended resource that the worker pods request
    gpus_in_use: Mapping[str, int] | None = None  # node → GPUs of that name that its pods request
    live: Live = field(default_factory=Live)
    unknown: list[str] = field(default_factory=list)

    def spec(self) -> Mapping[str, Any]:
        """Return the spec of the service with the fields of its profile, as far as that is known."""
        own = self.service.get("spec") or {}
        profile = self.references.get((PROFILE_KIND, profile_name(self.service))) or {}
        try:
            return merge_specs(profile.get("spec") or {}, given_fields(InferenceService.parse(self.service).spec)) if profile else own
        except InvalidManifest:
            return own  # the conditions name the problem


def read_facts(kube: Kube, namespace: str, name: str) -> Facts:
    """Read the facts. Raises UserError only if the service itself cannot be read."""
    facts = Facts(kube.service(namespace, name))
    selector = f"{names.MANAGED_BY}=fairlead,{names.INSTANCE}={name}"

    def attempt(right: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except Forbidden:
            facts.unknown.append(f"{right}: not permitted; ask the cluster's administrator for this permission")
        except UserError as error:
            facts.unknown.append(f"{right}: {error}")
        return None

    def list_items(path: str, right: str, **query: str) -> list[Body]:
        return attempt(right, lambda: kube.items(path, right=right, **query)) or []

    apps, core = f"/apis/apps/v1/namespaces/{namespace}", f"/api/v1/namespaces/{namespace}"
    deployments = list_items(f"{apps}/deployments", "list deployments.apps", selector=selector)
    by_component = {component_of(one): one for one in deployments}
    facts.replica_sets = list_items(f"{apps}/replicasets", "list replicasets.apps", selector=selector)
    facts.pods = list_items(f"{core}/pods", "list pods", selector=selector)
    if ((facts.service.get("spec") or {}).get("engine") or {}).get("nodes", 1) > 1:
        sets = WORKER_SETS.path(namespace)
        for one in list_items(sets, "list leaderworkersets.leaderworkerset.x-k8s.io", selector=selector):
            by_component[component_of(one)] = group_view.as_deployment(one, facts.pods)
    facts.deployments = by_component
    ours = {("InferenceService", name)}
    ours |= {(one.get("kind", "Deployment"), one["metadata"]["name"]) for one in facts.deployments.values()}
    ours |= {("ReplicaSet", one["metadata"]["name"]) for one in facts.replica_sets}
    ours |= {("Pod", one["metadata"]["name"]) for one in facts.pods}
    events = list_items(f"{core}/events", "list events")
    facts.events = [one for one in events if (one["involvedObject"].get("kind"), one["involvedObject"].get("name")) in ours]
    if profile := profile_name(facts.service):
        where = f"/apis/{API_VERSION}/namespaces/{namespace}/{PROFILE_PLURAL}/{profile}"
        facts.why[PROFILE_KIND, profile] = "spec.profileRef"
        try:
            facts.references[PROFILE_KIND, profile] = kube.get(where, right=f"get {PROFILE_PLURAL}")
        except NotFound:
            facts.references[PROFILE_KIND, profile] = None
        except UserError as error:
            facts.unknown.append(f"{PROFILE_KIND} {profile}: {error}")
    for kind, plural, needed, where in list_references({"spec": facts.spec()}):
        facts.why[kind, needed] = where
        accept = METADATA_ONLY if kind == "Secret" else "application/json"  # the Secret's content is not needed, so it is not read
        try:
            facts.references[kind, needed] = kube.get(f"{core}/{plural}/{needed}", right=f"get {plural}", accept=accept)
        except NotFound:
            facts.references[kind, needed] = None
        except UserError as error:
            facts.unknown.append(f"{kind} {needed}: {error}")
    if (requested := find_gpu_resource(facts.pods)) is not None:
        facts.gpu_resource = requested
        facts.nodes = attempt("list nodes", lambda: kube.items("/api/v1/nodes", right="list nodes"))
        everywhere = attempt("list pods in all namespaces", lambda: kube.items("/api/v1/pods", right="list pods"))
        facts.gpus_in_use = gpus_in_use(everywhere, requested) if everywhere is not None else None
    facts.live = read_routers(facts.pods, lambda pod, page: through_proxy(kube, namespace, pod, page))
    return facts


def list_references(service: Body) -> Iterable[tuple[str, str, str, str]]:
    """Yield the objects that the manifest refers to and the user must create: (kind, plural, name, field)."""
    spec = service.get("spec") or {}
    model, template = spec.get("model") or {}, (spec.get("podTemplate") or {}).get("spec") or {}
    claims = [
        (model.get("uri"), "spec.model.uri"),
        (
            ((spec.get("engine") or {}).get("speculativeDecoding") or {}).get("draftModelURI"),
            "spec.engine.speculativeDecoding.draftModelURI",
        ),
        *((one.get("uri"), "spec.model.adapters") for one in model.get("adapters") or []),
    ]
    for uri, where in claims:
        if str(uri).startswith("pvc://"):
            yield "PersistentVolumeClaim", "persistentvolumeclaims", _claim(str(uri)), where
    if claim := ((model.get("cache") or {}).get("persistentVolumeClaim") or {}).get("claimName"):
        yield "PersistentVolumeClaim", "persistentvolumeclaims", claim, "spec.model.cache.persistentVolumeClaim"
    for volume in template.get("volumes") or []:
        if claim := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
            yield "PersistentVolumeClaim", "persistentvolumeclaims", claim, "spec.podTemplate.spec.volumes"
        if secret := (volume.get("secret") or {}).get("secretName"):
            yield "Secret", "secrets", secret, "spec.podTemplate.spec.volumes"
    if secret := (model.get("secretRef") or {}).get("name"):
        yield "Secret", "secrets", secret, "spec.model.secretRef"
    if secret := ((spec.get("access") or {}).get("keysSecretRef") or {}).get("name"):
        yield "Secret", "secrets", secret, "spec.access.keysSecretRef"
    if secret := (((spec.get("router") or {}).get("tls")) or {}).get("secretName"):
        yield "Secret", "secrets", secret, "spec.router.tls"
    batch = spec.get("batch") or {}
    if str(batch.get("storageURI")).startswith("pvc://"):
        yield "PersistentVolumeClaim", "persistentvolumeclaims", _claim(batch["storageURI"]), "spec.batch.storageURI"
    if secret := batch.get("secretName"):
        yield "Secret", "secrets", secret, "spec.batch.secretName"
    for one in [*(spec.get("imagePullSecrets") or []), *(template.get("imagePullSecrets") or [])]:
        yield "Secret", "secrets", one["name"], "imagePullSecrets"


def _claim(uri: str) -> str:
    """Return the claim that a pvc:// URI names."""
    return uri.removeprefix("pvc://").partition("/")[0]


def find_gpu_resource(pods: Iterable[Body]) -> str | None:
    """Return the extended resource that the workers request, such as amd.com/gpu; None: they run on CPUs, or use DRA claims."""
    for pod in pods:
        for container in _long_running(pod):
            if container["name"] in ("worker", "engine"):
                limits = (container.get("resources") or {}).get("limits") or {}
                return next((name for name in sorted(limits) if "/" in name), None)
    return None


def gpus_in_use(pods: Iterable[Body], resource: str = NVIDIA) -> dict[str, int]:
    """Return node → GPUs that its pods request."""
    used: dict[str, int] = {}
    for pod in pods:
        spec = pod.get("spec") or {}
        if spec.get("nodeName") and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            limits = [(one.get("resources") or {}).get("limits") or {} for one in _long_running(pod)]
            used[spec["nodeName"]] = used.get(spec["nodeName"], 0) + sum(int(one.get(resource, 0)) for one in limits)
    return used


def _long_running(pod: Body) -> list[Body]:
    """Return the pod's containers, sidecars included."""
    spec = pod.get("spec") or {}
    sidecars = [one for one in spec.get("initContainers") or [] if one.get("restartPolicy") == "Always"]
    return [*sidecars, *(spec.get("containers") or [])]
