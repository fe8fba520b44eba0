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
        None,
        description="Redis users: of this service alone, one for all services, or none.",
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
        default_factory=list,
        max_length=16,
        description="State of the service, by type.",
        json_schema_extra=list_map("type"),
    )
