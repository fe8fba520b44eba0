"""Services and their pods at one moment, as rows: from the API server and from the routers."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from fairlead.errors import UserError
from fairlead.kube.api import Kube, UnexpectedStatus
from fairlead.kube.live import NO_ROUTER, Live, ignored_lines, is_ready, read_routers
from fairlead_operator import causes, names
from fairlead_operator.objects import component_of

Body = Mapping[str, Any]
READERS = 8  # services that are read concurrently


@dataclass(frozen=True)
class Figures:
    """Load figures; None: not known. `tokens`: a worker's counters (prompt, cached, generated), for rates between two snapshots."""

    running: int | None = None
    queued: int | None = None
    kv_use: float | None = None  # 0 to 1
    hit_rate: float | None = None
    tokens_per_second: float | None = None
    tokens: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class PodRow:
    name: str
    component: str
    state: str
    loading: str
    restarts: int
    figures: Figures
    message: str = ""


@dataclass(frozen=True)
class ServiceRow:
    namespace: str
    name: str
    ready: bool
    counts: str  # workers ready / wanted
    reason: str
    message: str
    loading: str
    revision: str
    figures: Figures
    pods: Sequence[PodRow] = ()
    notes: Sequence[str] = ()  # other problems, and what is not known
    conditions: Mapping[str, str] = field(default_factory=dict)  # type → True, False or Unknown

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read(kube: Kube, namespace: str, name: str = "", *, live: bool = True) -> list[ServiceRow]:
    """Return the rows of all services of a namespace (empty: of all namespaces), or of the one called `name`."""
    services = [kube.service(namespace, name)] if name else kube.services(namespace)
    path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
    selector = f"{names.MANAGED_BY}=fairlead" + (f",{names.INSTANCE}={name}" if name else "")
    pods, note = [], ""
    try:
        pods = list(kube.items(path, right="list pods", selector=selector))
    except UserError as error:
        note = str(error)
    by_service: dict[tuple[str, str], list[Body]] = {}
    for pod in pods:
        metadata = pod["metadata"]
        by_service.setdefault((metadata["namespace"], (metadata.get("labels") or {}).get(names.INSTANCE, "")), []).append(pod)

    def one(service: Body) -> ServiceRow:
        where, own = service["metadata"]["namespace"], by_service.get((service["metadata"]["namespace"], service["metadata"]["name"]), [])
        seen = read_routers(own, lambda pod, page: through_proxy(kube, where, pod, page)) if live and own else Live()
        return row(service, own, seen, [note] if note else [])

    with ThreadPoolExecutor(READERS) as pool:
        return sorted(pool.map(one, services), key=lambda found: (found.namespace, found.name))


def through_proxy(kube: Kube, namespace: str, pod: str, page: str) -> str:
    """Return a page of a router's admin port, read with the user's own credentials. Raises UserError."""
    port = names.ROUTER_ADMIN_PORT
    try:
        return kube.text(f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/{page}", right=f"get pods/proxy in namespace {namespace}")
    except UnexpectedStatus as error:
        instead = f"kubectl port-forward -n {namespace} {pod} {port}, and fairlead status --url http://127.0.0.1:{port}"
        raise UserError(f"{error}. If a NetworkPolicy stops the API server: {instead}") from None


def row(service: Body, pods: Iterable[Body], live: Live, notes: Sequence[str] = ()) -> ServiceRow:
    """Build the row of one service."""
    status = service.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or []}
    ready = conditions.get("Ready", {})
    behind = (status.get("loading") or {}).get("podName")
    rows = [
        pod_row(pod, live, _loading(status) if pod["metadata"]["name"] == behind else "")
        for pod in sorted(pods, key=lambda pod: (component_of(pod) != names.WORKER, pod["metadata"]["name"]))
    ]
    workers = [one.figures for one in rows if one.component == names.WORKER]
    fault, step = conditions.get("Degraded", {}), conditions.get("Progressing", {})
    further = [*notes]
    if live.problem and live.problem != NO_ROUTER:
        further.append(f"no live figures: {live.problem}")
    further += ignored_lines(live.ignored)
    if fault.get("status") == "True" and fault.get("reason") != ready.get("reason"):
        further.append(f"{fault.get('reason')}: {fault.get('message')}")
    if ready.get("status") == "True" and step.get("reason") not in (None, "Complete", "Probing", fault.get("reason")):
        further.append(f"{step.get('reason')}: {step.get('message')}")
    return ServiceRow(
        namespace=service["metadata"]["namespace"],
        name=service["metadata"]["name"],
        ready=ready.get("status") == "True",
        counts=ready_counts(status),
        reason=ready.get("reason") or "NotObserved",
        message=ready.get("message") or ("" if ready else "no operator has seen this service yet: check that fairlead-operator runs"),
        loading=_loading(status),
        revision=str(status.get("revision", "")),
        figures=sum_figures(workers, live, status.get("traffic") or {}),
        pods=rows,
        notes=[*further, *_scaling(status)],
        conditions={name: one["status"] for name, one in conditions.items()},
    )


def pod_row(pod: Body, live: Live, loading: str = "") -> PodRow:
    """Build the row of one pod. `loading`: its progress from the service's status; if empty, the router's reason is used."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    cause = causes.find_pod_cause(pod)
    seen = live.workers.get(metadata["name"], {})
    state = "Terminating" if metadata.get("deletionTimestamp") else cause.reason if cause else "Ready"
    if state == "Ready" and seen:
        state = "Draining" if seen.get("draining") else state if seen.get("usable", True) else "Avoided"
    return PodRow(
        name=metadata["name"],
        component=component_of(pod),
        state=state,
        loading=loading or (str(seen.get("reason") or "") if state == "Loading" else ""),
        restarts=sum(
            int(one.get("restartCount") or 0) for kind in ("initContainerStatuses", "containerStatuses") for one in status.get(kind) or []
        ),
        figures=worker_figures(seen) if seen and is_ready(pod) else Figures(),
        message=cause.message if cause and cause.fault and not metadata.get("deletionTimestamp") else "",
    )


def worker_figures(seen: Body) -> Figures:
    load = seen.get("load") or {}
    total, prompt = load.get("pages_total") or 0, load.get("prompt_tokens")
    tokens = (prompt, load["cached_tokens"], load["output_tokens"]) if prompt is not None else None
    return Figures(
        running=load.get("running"),
        queued=load.get("waiting"),
        kv_use=1 - load.get("pages_free", 0) / total if total else None,
        hit_rate=tokens[1] / tokens[0] if tokens and tokens[0] else None,
        tokens=tokens,
    )


def sum_figures(workers: Sequence[Figures], live: Live, traffic: Body) -> Figures:
    """Sum up the workers' figures. The operator's figures of the last minute take precedence over counters since the workers' start."""
    known = [one for one in workers if one.running is not None]
    used = [one.kv_use for one in known if one.kv_use is not None]
    counted = [one.tokens for one in known if one.tokens is not None]
    sums = (sum(one[0] for one in counted), sum(one[1] for one in counted), sum(one[2] for one in counted))
    measured = traffic.get("cacheHitPercent")
    return Figures(
        running=sum(one.running or 0 for one in known) if known else None,
        queued=sum(one.queued or 0 for one in known) + (live.queued or 0) if known or live.queued is not None else None,
        kv_use=sum(used) / len(used) if used else None,
        hit_rate=measured / 100 if measured is not None else sums[1] / sums[0] if sums[0] else None,
        tokens_per_second=traffic.get("tokensPerSecond"),
        tokens=sums if counted else None,
    )


def ready_counts(status: Body) -> str:
    """Return the ready and the desired workers, such as `2/3`; `?` before the first status."""
    if "desiredReplicas" not in status:
        return "?"
    desired = int(status["desiredReplicas"])
    return f"{min(int(status.get('readyReplicas') or 0), desired)}/{desired}"


def _loading(status: Body) -> str:
    loading = status.get("loading") or {}
    return f"{loading.get('phase', 'Loading')} {loading.get('percent', 0)} %" if loading else ""


def _scaling(status: Body) -> list[str]:
    scaling = status.get("scaling") or {}
    details = ", ".join(f"{key}: {value}" for key, value in scaling.items() if value not in (None, "", [], {}))
    return [f"scaling: {details}"] if details else []
