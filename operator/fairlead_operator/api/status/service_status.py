"""`status` of an InferenceService. Only the operator writes it."""

from typing import Annotated, Literal

from pydantic import Field

from fairlead_operator.api.fields import Part, list_map
from fairlead_operator.api.status.loading import LoadingStatus
from fairlead_operator.api.status.revisions import ImageUpdateStatus, ModelCommitStatus, RevisionStatus
from fairlead_operator.api.status.traffic import TrafficStatus

Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]


class Condition(Part):
    """A condition with the fields of metav1.Condition."""

    type: str = Field(
        max_length=316,
        pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
        description="Type of the condition.",
    )
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    observed_generation: int = Field(0, ge=0, description="metadata.generation that this condition was computed from.")
    last_transition_time: Time = Field(description="When status last changed.")
    reason: str = Field(min_length=1, max_length=1024, description="Reason of the last transition, in CamelCase.")
    message: str = Field(max_length=32768, description="Cause and remedy, for people. May be empty.")


class IndexStatus(Part):
    """The prefix index as one router sees it. Coarse by design: an unchanged service causes no writes."""

    state: Literal["Available", "Unavailable", "Disabled", "Unused", "Unknown"] = Field(
        description="Unavailable: routing is by load. Disabled: the operator has no Redis. Unused: spec.routing.policy does not read it."
        " Unknown: no router answers."
    )
    last_transition_time: Time = Field(description="When state last changed.")
    read_mode: Literal["Mirror", "Remote"] | None = Field(
        None, description="Mirror: from the router's copy. Remote: from Redis for each request."
    )
    message: str = Field("", max_length=512, description="Why the index is not available.")
    credentials: Literal["PerService", "Shared", "None"] | None = Field(
        None,
        description="PerService: Redis users of this service alone. Shared: one user for all services. None: Redis requires no password.",
    )
    credentials_message: str = Field("", max_length=512, description="Why there are no Redis users for each service.")
    prediction_error_percent: Annotated[int, Field(ge=0, le=100)] | None = Field(
        None, description="Largest recent error of the index about a worker's cache, in percent of a prompt, rounded to tens."
    )


class CanaryStatus(Part):
    """A revision under test."""

    revision: str = Field(max_length=64, description="The revision under test. spec.rollout.canary.promotedRevision accepts this value.")
    phase: Literal["Waiting", "Starting", "Analyzing", "Paused", "Promoting", "Failed"] = Field(
        description="Waiting: for the routers. Starting: of its pods. Analyzing: observed. Paused: until promotedRevision names it. "
        "Promoting: replaces old pods. Failed: rolled back."
    )
    traffic_percent: int = Field(0, ge=0, le=100, description="Percent of conversations that go to it.")


class ScalingStatus(Part):
    """The last decision of the operator's autoscaler, and the schedule in effect."""

    desired_replicas: int = Field(ge=0, description="Workers that the autoscaler or a schedule decided on.")
    message: str = Field("", max_length=256, description="The last change, and its cause.")
    schedule: str = Field("", max_length=253, description="The schedule of spec.scaling.schedules whose minimum is in effect.")


class RoutersStatus(Part):
    """The routers."""

    desired_replicas: int = Field(0, ge=0, description="Routers that should exist, from spec.routing.replicas or their autoscaler.")
    replicas: int = Field(0, ge=0, description="Routers that exist.")
    ready_replicas: int = Field(0, ge=0, description="Routers that are ready.")
    message: str = Field("", max_length=256, description="Why the autoscaler does not set their number. Empty: it does, or there is none.")


class ServiceStatus(Part):
    """The last observed state."""

    observed_generation: int = Field(
        0, ge=-1, description="metadata.generation that this status was computed from. -1: no operator has seen the service."
    )
    url: str = Field("", max_length=512, description="Base URL of the OpenAI-compatible API inside the cluster.")
    external_url: str = Field(
        "", max_length=512, description="Base URL of the API for clients outside the cluster, through spec.exposure.gateway."
    )
    model_name: str = Field("", max_length=253, description='Value of "model" in requests.')
    desired_replicas: int = Field(0, ge=0, description="Workers that should exist, from spec.replicas, spec.scaling or the autoscaler.")
    replicas: int = Field(0, ge=0, description="Workers that exist.")
    ready_replicas: int = Field(0, ge=0, description="Workers that are ready.")
    updated_replicas: int = Field(0, ge=0, description="Workers of the desired revision.")
    routers: RoutersStatus | None = Field(None, description="The routers.")
    selector: str = Field("", max_length=1024, description="Label selector of the workers, for autoscalers.")
    revision: str = Field("", max_length=128, description="Desired revision: a digest of the fields that shape worker pods.")
    reduced_since: Time | None = Field(
        None, description="Since when fewer workers or routers are ready than should be. Absent while all are."
    )
    revisions: list[RevisionStatus] = Field(
        default_factory=list, max_length=32, description="Revisions of workers and routers.", json_schema_extra=list_map("name")
    )
    image_update: ImageUpdateStatus | None = Field(None, description="Progress of the operator's images to this service.")
    model_commit: ModelCommitStatus | None = Field(None, description="Commit of the hf:// model. Absent for other models.")
    loading: LoadingStatus | None = Field(None, description="Load progress of the slowest worker. Absent while no worker loads.")
    index: IndexStatus | None = Field(None, description="The prefix index as one router sees it. Absent while no router is ready.")
    traffic: TrafficStatus | None = Field(None, description="Recent token rates. Absent until a router was polled twice.")
    canary: CanaryStatus | None = Field(None, description="The revision under test. Absent while there is none.")
    scaling: ScalingStatus | None = Field(
        None, description="The last decision of the autoscaler. Absent without spec.scaling.target and schedules."
    )
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="Ready, Available, Progressing, WeightsReady, Routable, PodTemplateValid, Degraded, UpToDate; "
        "GatewayReady, BatchReady, ModelCached; while True: Reconciling, Stalled.",
        json_schema_extra=list_map("type"),
    )
