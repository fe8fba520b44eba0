"""`status` of an InferenceService. Only the operator writes it; users and the command line read it."""

from typing import Annotated, Literal

from pydantic import Field

from fairlead_operator.api.fields import Part, list_map

Phase = Literal["Starting", "Waiting", "Downloading", "Loading", "Preparing", "Warming"]
UpdatePhase = Literal["Current", "Pinned", "Held", "Waiting", "RollingOut", "Observing", "RollingBack", "Failed"]
Text = Annotated[str, Field(max_length=512)]
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]


class Condition(Part):
    """A condition with the fields of metav1.Condition."""

    type: str = Field(
        max_length=316,
        pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
        description="Its type.",
    )
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    observed_generation: int = Field(0, ge=0, description="metadata.generation that this condition was computed from.")
    last_transition_time: Time = Field(description="Of status.")
    reason: str = Field(min_length=1, max_length=1024, description="Reason of the last transition, in CamelCase.")
    message: str = Field(max_length=32768, description="Cause and remedy, for people. May be empty.")


class IndexStatus(Part):
    """The prefix index as one router sees it. Coarse by design: an unchanged service causes no writes."""

    state: Literal["Available", "Unavailable", "Disabled", "Unused", "Unknown"] = Field(
        description="Unavailable: routing is by load. Disabled: no Redis. Unused: by spec.routing.policy. Unknown: no router answers."
    )
    last_transition_time: Time = Field(description="When state last changed.")
    read_mode: Literal["Mirror", "Remote"] | None = Field(
        None, description="Mirror: from the router's copy. Remote: from Redis for each request."
    )
    message: str = Field("", max_length=512, description="Why the index is not available.")
    credentials: Literal["PerService", "Shared", "None"] | None = Field(
        None, description="Redis users: of this service alone, one for all services, or none."
    )
    credentials_message: str = Field("", max_length=512, description="Why there are no Redis users for each service.")
    prediction_error_percent: Annotated[int, Field(ge=0, le=100)] | None = Field(
        None, description="Largest recent error of the index about a cache, in percent of a prompt."
    )


class CanaryStatus(Part):
    """A revision under test."""

    revision: str = Field(max_length=64, description="The revision under test, a value of promotedRevision.")
    phase: Literal["Waiting", "Starting", "Analyzing", "Paused", "Promoting", "Failed"] = Field(
        description="Analyzing: observed. Paused: until promotedRevision names it. Failed: rolled back."
    )
    traffic_percent: int = Field(0, ge=0, le=100, description="Percent of conversations that go to it.")


class ScalingStatus(Part):
    """The last decision of the operator's autoscaler, and the schedule in effect."""

    desired_replicas: int = Field(ge=0, description="Workers that the autoscaler or a schedule decided on.")
    message: str = Field("", max_length=256, description="The last change, and its cause.")
    schedule: str = Field("", max_length=253, description="The schedule of spec.scaling.schedules whose minimum is in effect.")


class RoutersStatus(Part):
    """The routers."""

    desired_replicas: int = Field(0, ge=0, description="Routers that should exist.")
    replicas: int = Field(0, ge=0, description="Routers that exist.")
    ready_replicas: int = Field(0, ge=0, description="Routers that are ready.")
    message: str = Field("", max_length=256, description="Why the autoscaler does not set their number.")


class LoadingStatus(Part):
    """`status.loading`: load progress of the slowest worker. Coarse by design: a load of one hour causes some dozens of writes."""

    phase: Phase = Field(
        description="Waiting: for a download or other nodes. Loading: weights. Preparing: kernels, KV pages. Warming: prefixes of other "
        "workers."
    )
    percent: int = Field(0, ge=0, le=100, description="Progress within this phase, in steps of 5.")
    total_bytes: Annotated[int, Field(ge=0)] | None = Field(None, description="Size that percent refers to. Absent: unknown.")
    pod_name: str = Field("", max_length=253, description="Name of the pod.")


class TrafficStatus(Part):
    """`status.traffic`, rounded. Written at most once a minute, when a figure changes by more than a tenth, never while idle."""

    tokens_per_second: int = Field(0, ge=0, description="Tokens generated per second by all workers.")
    prompt_tokens_per_second: int = Field(0, ge=0, description="Prompt tokens received per second, cached tokens included.")
    cache_hit_percent: Annotated[int, Field(ge=0, le=100)] | None = Field(None, description="Percent of prompt tokens found in KV caches.")
    last_update_time: str = Field(
        "", json_schema_extra={"format": "date-time"}, max_length=64, description="When these figures were written."
    )


class RevisionStatus(Part):
    """A revision that pods run, or that new pods get."""

    name: str = Field(max_length=128, description="Name of its ControllerRevision.")
    component: Literal["worker", "router"] = Field(description="Component of the pods.")
    image: Text = Field("", description="Image of its pods.")
    desired: bool = Field(False, description="New pods get this revision.")
    replicas: int = Field(0, ge=0, description="Pods that run it.")
    ready_replicas: int = Field(0, ge=0, description="Those that are ready.")


class ImageUpdateStatus(Part):
    """Progress of the operator's images to this service. The operator continues from here after a restart."""

    phase: UpdatePhase = Field(
        description="Pinned, Held (paused), Waiting: newer images exist. Observing: serves and is judged. Failed: went back."
    )
    worker_image: Text = Field("", description="Worker image that this phase is about.")
    router_image: Text = Field("", description="Router image that this phase is about.")
    previous_worker_image: Text = Field("", description="Worker image to which a failed update goes back.")
    previous_router_image: Text = Field("", description="Router image to which a failed update goes back.")
    surge_gpus: int = Field(0, ge=0, alias="surgeGPUs", description="GPUs that the update may use in addition.")
    start_time: Time | None = Field(None, description="When the phase began.")
    restarted_at: Annotated[str, Field(max_length=64)] = Field("", description="spec.rollout.restartedAt at the update.")
    error_percent_before: Annotated[str, Field(max_length=16)] = Field("", description="Percent of failed requests before the update.")
    held: bool = Field(False, description="The spec holds the update up: it takes no place among maxServices.")
    message: Text = Field("", description="Why, and how to continue.")


class ModelCommitStatus(Part):
    """The commit of an hf:// model that all workers of the desired revision load."""

    commit: Annotated[str, Field(max_length=40)] = Field("", description="Commit of the hub. Empty: each worker resolves it.")
    message: Text = Field("", description="Why the operator has not resolved it.")


class ServiceStatus(Part):
    """The last observed state."""

    observed_generation: int = Field(0, ge=-1, description="metadata.generation of this status. -1: no operator has seen the service.")
    url: str = Field("", max_length=512, description="Base URL of the OpenAI-compatible API inside the cluster.")
    external_url: str = Field("", max_length=512, description="Base URL for clients outside the cluster, through spec.exposure.gateway.")
    model_name: str = Field("", max_length=253, description='Value of "model" in requests.')
    desired_replicas: int = Field(0, ge=0, description="Workers that should exist.")
    replicas: int = Field(0, ge=0, description="Workers that exist.")
    ready_replicas: int = Field(0, ge=0, description="Workers that are ready.")
    updated_replicas: int = Field(0, ge=0, description="Workers of the desired revision.")
    routers: RoutersStatus | None = Field(None, description="The routers.")
    selector: str = Field("", max_length=1024, description="Label selector of the workers, for autoscalers.")
    revision: str = Field("", max_length=128, description="Desired revision: a digest of what shapes worker pods.")
    reduced_since: Time | None = Field(None, description="Since when fewer workers or routers are ready than should be.")
    revisions: list[RevisionStatus] = Field(
        default_factory=list, max_length=32, description="Revisions of workers and routers.", json_schema_extra=list_map("name")
    )
    image_update: ImageUpdateStatus | None = Field(None, description="Progress of the operator's images to this service.")
    model_commit: ModelCommitStatus | None = Field(None, description="Commit of the hf:// model. Absent for other models.")
    loading: LoadingStatus | None = Field(None, description="Load progress of the slowest worker.")
    index: IndexStatus | None = Field(None, description="The prefix index as one router sees it.")
    traffic: TrafficStatus | None = Field(None, description="Recent token rates.")
    canary: CanaryStatus | None = Field(None, description="The revision under test. Absent while there is none.")
    scaling: ScalingStatus | None = Field(None, description="The last decision of the autoscaler or of a schedule.")
    conditions: list[Condition] = Field(
        default_factory=list, max_length=16, description="State of the service, by type.", json_schema_extra=list_map("type")
    )
