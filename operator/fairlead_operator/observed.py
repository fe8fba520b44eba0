"""What the cluster shows of one service: Deployments, pods, what the API server refused, and the last request through the router."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from fairlead_common.canary_split import SplitReport
from fairlead_operator.api.loading import Phase
from fairlead_operator.objects import Body, is_canary

LOADING_STEP = 5  # percent
PHASES = {phase: place for place, phase in enumerate(get_args(Phase))}
"""Phases of a load, in their order."""


@dataclass(frozen=True)
class ProbeResult:
    """One completion of one token, asked of the service's own address."""

    generation: int  # of the service, when it was asked
    succeeded: bool
    message: str  # what went wrong; empty when it succeeded
    attempts: int  # failures in a row, this one included
    at: float  # seconds since the epoch


@dataclass(frozen=True)
class ObservedIndex:
    """The prefix index, as one router answered."""

    state: str  # Ok, Unavailable, Off, Unused, Unknown
    reason: str = ""
    read: str = ""  # Mirror, Remote or nothing
    error_percent: int | None = None  # of a prompt, the worst worker's; None: too few answers to judge


@dataclass(frozen=True)
class ObservedRedis:
    """With which credentials workers and routers reach the index's Redis."""

    state: Literal["", "PerService", "Shared", "None"]  # empty: not known yet, Redis has not answered
    reason: str = ""  # why it is not PerService
    installation: str = ""
    key: str = field(default="", repr=False)  # from which the passwords of services are derived
    files: Mapping[str, str] = field(default_factory=dict, repr=False)  # of all services: authorities, client certificate
    login: Mapping[str, str] = field(default_factory=dict, repr=False)  # username and password that all services share


@dataclass(frozen=True)
class ObservedTraffic:
    """What went through all workers between two looks at a router."""

    tokens_per_second: int
    prompt_tokens_per_second: int
    cache_hit_percent: int | None  # None: no prompt came


@dataclass(frozen=True)
class ObservedCanary:
    """How both sides of a split fared, added up over the routers that answered."""

    report: SplitReport
    routers: int  # that answered and know of this split


@dataclass(frozen=True)
class FieldConflict:
    """Somebody sets the replicas of a child again and again."""

    kind: str
    name: str
    component: str
    manager: str  # of the field, as the API server has it
    until: float  # seconds since the epoch: when it counts as over, should it not happen again


@dataclass(frozen=True)
class ObservedLoading:
    """What one worker answered while it was not ready."""

    phase: str = "Starting"
    percent: int = 0
    total_bytes: int = 0

    @classmethod
    def of(cls, page: Mapping[str, Any]) -> "ObservedLoading | None":
        """From `GET /ready` (docs/contracts.md); None for a worker that does not load: it drains, has failed, or is of an older release."""
        if page.get("stage") not in PHASES:
            return None
        percent = max(0, min(100, int(page.get("percent") or 0)))
        return cls(page["stage"], percent - percent % LOADING_STEP, int(page.get("total_bytes") or 0))


@dataclass(frozen=True)
class PodEvent:
    """The newest telling Event of one pod."""

    reason: str
    message: str


@dataclass(frozen=True)
class Recommendation:
    """At one moment. `more`: workers that should be there, 0 while those that are there do; `fewest`: with so few it would still hold."""

    at: float  # seconds since the epoch
    scale_up_to: int
    scale_down_to: int
    idle_seconds: float  # since anybody asked anything of a worker that served, 0 while that is not known
    has_requests: bool  # requests are there now
    had_requests: bool = False  # or came in the last window, by ways that a router sees only for a moment
    why: str = ""  # of `more`


@dataclass(frozen=True)
class SizeDecision:
    """`reason`: in words, empty while nothing changes."""

    wanted: int
    reason: str = ""


@dataclass(frozen=True)
class Observed:
    """Everything that `desired` may know beside the service itself."""

    deployments: Mapping[str, Body] = field(default_factory=dict)  # component → Deployment
    pods: tuple[Body, ...] = ()
    revisions: tuple[Body, ...] = ()  # ControllerRevisions: the pod templates of this service so far
    refusals: Mapping[str, str] = field(default_factory=dict)  # "Deployment/qwen-worker" → the API server's words
    probe: ProbeResult | None = None
    index: ObservedIndex | None = None  # None: nobody was asked yet
    redis: ObservedRedis | None = None  # None: the operator has not looked yet
    served: frozenset[str] = frozenset()  # those of the kinds that a cluster may lack which this one has
    optional_objects: Mapping[str, Body] = field(default_factory=dict)  # of those kinds, by kind: this service's object
    traffic: ObservedTraffic | None = None
    pod_events: Mapping[str, PodEvent] = field(default_factory=dict)  # pod → its newest telling Event, of pods that hang
    canary: ObservedCanary | None = None  # None: nobody was asked yet
    last_departure_at: float = 0.0  # seconds since the epoch from which on no worker has left, as far as this process has seen
    loading: Mapping[str, ObservedLoading] = field(default_factory=dict)  # pod → how far it is, of those that are not ready
    recommendations: tuple[Recommendation, ...] = ()  # of the last minutes, by what routers said; oldest first
    progress_deadline_at: float | None = None  # seconds since the epoch at which workers of several pods have not got on for too long
    field_conflicts: tuple[FieldConflict, ...] = ()  # as far as this process has seen
    decision: SizeDecision | None = None  # the last change of the size that this process has decided

    @property
    def stable(self) -> "Observed":
        """Without a canary's pods: what the workers' own Deployment and the routers' have made."""
        return replace(self, pods=tuple(pod for pod in self.pods if not is_canary(pod)))


@dataclass(frozen=True)
class Replicas:
    """The counts of one Deployment; all zero until its controller has seen the spec that was written last."""

    wanted: int
    total: int = 0
    ready: int = 0
    updated: int = 0
    current: bool = False  # the counts speak of the present spec
    failure: tuple[str, str] | None = None  # reason, message: no pod can be made (quota, Pod Security)
    stalled: str = ""  # past its progress deadline

    @classmethod
    def of(cls, deployment: Body | None, wanted: int, *, settled: bool = False) -> "Replicas":
        """`settled`: this spec was seen complete before, so a controller that is behind by a generation has not yet said otherwise.

        A mere annotation raises a Deployment's generation; without this each one would make a serving service unready for a moment.
        """
        if deployment is None:
            return cls(wanted)
        status = deployment.get("status") or {}
        conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
        failure, progress = conditions.get("ReplicaFailure"), conditions.get("Progressing")
        generation = int((deployment.get("metadata") or {}).get("generation") or 0)
        seen = settled or 0 < generation <= int(status.get("observedGeneration") or 0)
        return cls(
            wanted,
            total=int(status.get("replicas") or 0),
            ready=int(status.get("readyReplicas") or 0),
            updated=int(status.get("updatedReplicas") or 0),
            current=seen and deployment["spec"].get("replicas") == wanted,
            failure=(failure["reason"], failure.get("message", "")) if failure and failure["status"] == "True" else None,
            stalled=progress.get("message", "") if progress and progress.get("reason") == "ProgressDeadlineExceeded" else "",
        )

    @property
    def complete(self) -> bool:
        """All wanted pods are of the present template and ready, and no other is left."""
        return self.current and self.total == self.updated == self.ready == self.wanted

    @property
    def rolled_out(self) -> bool:
        return self.current and self.updated == self.wanted == self.total
