"""The observed state of one service: Deployments, pods, refusals of the API server, and the last probe through the router."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from fairlead_common.canary_split import SplitReport
from fairlead_operator import names
from fairlead_operator.api.status import Phase
from fairlead_operator.objects import Body, component_of, conditions_of, is_canary, ready_at

LOADING_STEP = 5  # percent
PHASES = {phase: place for place, phase in enumerate(get_args(Phase))}
"""Phases of loading, in their order."""


@dataclass(frozen=True)
class ProbeResult:
    """The result of one completion of one token, requested at the service's own address."""

    generation: int  # of the service, when the probe was sent
    succeeded: bool
    message: str  # the error; empty after success
    attempts: int  # consecutive failures, including this one
    at: float  # seconds since the epoch


@dataclass(frozen=True)
class ObservedIndex:
    """The prefix index, as one router reports it."""

    state: str  # Available, Unavailable, Disabled, Unused, Unknown
    reason: str = ""
    read: str = ""  # Mirror, Remote or empty
    error_percent: int | None = None  # of a prompt's prediction, of the worst worker; None: too few answers to judge


@dataclass(frozen=True)
class ObservedRedis:
    """The credentials with which workers and routers reach the index's Redis."""

    state: Literal["", "PerService", "Shared", "None"]  # empty: unknown, Redis has not answered yet
    reason: str = ""  # why it is not PerService
    installation: str = ""
    key: str = field(default="", repr=False)  # from which the passwords of services are derived
    files: Mapping[str, str] = field(default_factory=dict, repr=False)  # for all services: authorities, client certificate
    login: Mapping[str, str] = field(default_factory=dict, repr=False)  # shared by all services: username and password


@dataclass(frozen=True)
class ObservedTraffic:
    """The traffic of all workers between two polls of a router."""

    tokens_per_second: int
    prompt_tokens_per_second: int
    cache_hit_percent: int | None  # None: there was no prompt


@dataclass(frozen=True)
class ObservedCanary:
    """The results of both sides of a split, summed over the routers that answered."""

    report: SplitReport
    routers: int  # that answered, and know this split


@dataclass(frozen=True)
class FieldConflict:
    """Another writer that keeps setting the replicas of a child."""

    kind: str
    name: str
    component: str
    manager: str  # the field manager
    until: float  # seconds since the epoch: the end of the conflict, unless it happens again


@dataclass(frozen=True)
class ObservedLoading:
    """The answer of one worker that is not ready."""

    phase: str = "Starting"
    percent: int = 0
    total_bytes: int = 0

    @classmethod
    def parse(cls, page: Mapping[str, Any]) -> "ObservedLoading | None":
        """Parse `GET /ready`. Return None for a worker that drains, has failed, or is of an older release."""
        if page.get("stage") not in PHASES:
            return None
        percent = max(0, min(100, int(page.get("percent") or 0)))
        return cls(page["stage"], percent - percent % LOADING_STEP, int(page.get("total_bytes") or 0))


@dataclass(frozen=True)
class PodEvent:
    """The newest relevant Event of one pod, or of a Job without a pod."""

    reason: str
    message: str


@dataclass(frozen=True)
class Recommendation:
    """The recommended sizes at one moment.

    `scale_up_to`: workers that are needed, 0 while the present ones suffice. `scale_down_to`: the fewest workers that would still suffice.
    """

    at: float  # seconds since the epoch
    scale_up_to: int
    scale_down_to: int
    idle_seconds: float  # since the last request that a ready worker could serve; 0 while unknown
    has_requests: bool  # requests are present now
    had_requests: bool = False  # requests are present or arrived in the last window; a router sees short ones only briefly
    why: str = ""  # for `scale_up_to`
    tokens_per_second: float = 0.0  # prompt tokens that arrived and caches did not have, in the routers' window


@dataclass(frozen=True)
class SizeDecision:
    """`reason` is empty while nothing changes."""

    desired: int
    reason: str = ""


@dataclass(frozen=True)
class OtherService:
    """What another service of the namespace serves."""

    models: tuple[str, ...]  # its model name, and those of its adapters
    has_tls: bool = False

    @classmethod
    def parse(cls, body: Body) -> "OtherService":
        """Read an InferenceService that has its profile's fields, whatever release its spec is of."""
        model = body["spec"].get("model") or {}
        adapters = [str(one["name"]) for one in model.get("adapters") or [] if "name" in one]
        return cls((str(model.get("name") or body["metadata"]["name"]), *adapters), bool((body["spec"].get("router") or {}).get("tls")))


@dataclass(frozen=True)
class ObservedErrors:
    """Requests and failed ones (status 5xx) that the routers counted since an update was admitted, and the share of failed ones before."""

    requests: int = 0
    errors: int = 0
    rate_before: float | None = None  # of all requests of the present routers; None: unknown


@dataclass(frozen=True)
class FleetView:
    """What the rollout of images over all services says to one service."""

    admitted: bool = False  # it may begin its update
    stopped: str | None = ""  # why no service may begin; empty: waves go on; None: not known yet, after a restart


@dataclass(frozen=True)
class HubModel:
    """A model of the hub whose revision is to be resolved."""

    repository: str
    revision: str  # branch or tag; empty: the default branch
    endpoint: str = ""  # of the hub that its workers use; empty: the default one
    needs_token: bool = False  # the service has a token, which the operator does not read


@dataclass(frozen=True)
class ModelCommit:
    """The hub's answer: the commit, or why there is none."""

    commit: str = ""
    problem: str = ""
    model: HubModel | None = None  # what was asked for: an edited service does not use the answer


@dataclass(frozen=True)
class Observed:
    """All inputs of `desired` beside the service itself."""

    deployments: Mapping[str, Body] = field(default_factory=dict)  # component → Deployment
    pods: tuple[Body, ...] = ()
    revisions: tuple[Body, ...] = ()  # ControllerRevisions: the pod templates of this service so far
    jobs: tuple[Body, ...] = ()  # that download models into the cache
    refusals: Mapping[str, str] = field(default_factory=dict)  # "Deployment/qwen-worker" → the API server's message
    probe: ProbeResult | None = None
    index: ObservedIndex | None = None  # None: no router has answered yet
    redis: ObservedRedis | None = None  # None: the credentials are not known yet
    served: frozenset[str] = frozenset()  # the optional kinds that this cluster serves
    optional_objects: Mapping[str, Body] = field(default_factory=dict)  # optional kind → this service's object of it
    other_services: Mapping[str, OtherService] = field(default_factory=dict)  # those of spec.exposure.otherServices that exist
    gateway: Body | None = None  # the Gateway of spec.exposure.gateway; empty: it does not exist; None: unknown
    traffic: ObservedTraffic | None = None
    fallbacks: Mapping[str, str] | None = None  # pod → why it runs without CUDA graphs or overlap; None: no router has answered yet
    pod_events: Mapping[str, PodEvent] = field(default_factory=dict)  # pod or Job → its newest relevant Event, if it is stuck
    canary: ObservedCanary | None = None  # None: no router has answered yet
    last_departure_at: float = 0.0  # seconds since the epoch when a worker last left, as far as this process knows
    loading: Mapping[str, ObservedLoading] = field(default_factory=dict)  # pod → its loading progress, of pods that are not ready
    recommendations: tuple[Recommendation, ...] = ()  # of the last minutes, from the routers' reports; oldest first
    progress_deadline_at: float | None = None  # seconds since the epoch when workers of several pods exceed their progress deadline
    field_conflicts: tuple[FieldConflict, ...] = ()  # as far as this process knows
    fleet: FleetView = FleetView()
    errors: ObservedErrors | None = None  # None: no router has answered yet
    model_commit: ModelCommit | None = None  # for a revision that has no template yet
    decision: SizeDecision | None = None  # the last change of the size that this process decided

    @property
    def has_ready_router(self) -> bool:
        return any(component_of(pod) == names.ROUTER and ready_at(pod) is not None for pod in self.pods)

    @property
    def stable(self) -> "Observed":
        """Without canary pods: the pods of the workers' own Deployment and of the routers'."""
        return replace(self, pods=tuple(pod for pod in self.pods if not is_canary(pod)))


@dataclass(frozen=True)
class Replicas:
    """The counts of one Deployment; zero until its controller has observed the latest spec."""

    desired: int
    total: int = 0
    ready: int = 0
    updated: int = 0
    current: bool = False  # the counts describe the latest spec
    failure: tuple[str, str] | None = None  # reason, message: no pod can be created (quota, Pod Security)
    stalled: str = ""  # the message after the progress deadline

    @classmethod
    def of(cls, deployment: Body | None, desired: int, *, settled: bool = False) -> "Replicas":
        """Read the counts. `settled`: this spec was complete before, so a controller one generation behind has not reported otherwise.

        An annotation alone raises a Deployment's generation. Without `settled` each one would make a ready service not ready for a moment.
        """
        if deployment is None:
            return cls(desired)
        status = deployment.get("status") or {}
        conditions = conditions_of(deployment)
        failure, progress = conditions.get("ReplicaFailure"), conditions.get("Progressing")
        generation = int((deployment.get("metadata") or {}).get("generation") or 0)
        seen = settled or 0 < generation <= int(status.get("observedGeneration") or 0)
        return cls(
            desired,
            total=int(status.get("replicas") or 0),
            ready=int(status.get("readyReplicas") or 0),
            updated=int(status.get("updatedReplicas") or 0),
            current=seen and deployment["spec"].get("replicas") == desired,
            failure=(failure["reason"], failure.get("message", "")) if failure and failure["status"] == "True" else None,
            stalled=progress.get("message", "") if progress and progress.get("reason") == "ProgressDeadlineExceeded" else "",
        )

    @property
    def complete(self) -> bool:
        """All desired pods are ready and of the latest template, and no other pod exists."""
        return self.current and self.total == self.updated == self.ready == self.desired

    @property
    def rolled_out(self) -> bool:
        return self.current and self.updated == self.desired == self.total
