"""`status` of an InferenceService, written by the operator alone."""

from typing import Annotated, Literal

from pydantic import Field

from fairlead_operator.api.fields import Part
from fairlead_operator.api.loading import LoadingStatus
from fairlead_operator.api.traffic import TrafficStatus


class Condition(Part):
    """One condition, in the form that `kubectl wait --for=condition=` reads."""

    type: str = Field(
        max_length=64, description="Ready, Available, Progressing, WeightsReady, Routable, PodTemplateValid, GatewayReady or Degraded."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    observed_generation: int = Field(0, ge=0, description="The generation of the service that this was said of.")
    last_transition_time: str = Field("", json_schema_extra={"format": "date-time"}, max_length=64, description="When status last changed.")
    reason: str = Field("", max_length=128, description="One word for machines.")
    message: str = Field("", max_length=2048, description="The cause, for people.")


class IndexStatus(Part):
    """The prefix index as one router sees it. Coarse on purpose: a service that stays as it is causes no write."""

    state: Literal["Ok", "Unavailable", "Off", "Unused", "Unknown"] = Field(
        description="Ok; Unavailable: requests go by load; Off: the operator has no Redis; Unused: by spec.routing.policy; "
        "Unknown: no router answers."
    )
    since: str = Field("", json_schema_extra={"format": "date-time"}, max_length=64, description="When state last changed.")
    read: Literal["", "Mirror", "Remote"] = Field(
        "", description="Mirror: from the router's copy; Remote: Redis is asked for each request."
    )
    reason: str = Field("", max_length=512, description="Why it is not available.")
    credentials: Literal["", "PerService", "Shared", "None"] = Field(
        "",
        description="PerService: workers and routers have a Redis user each, limited to this service; Shared: one user for all services; "
        "None: Redis asks for no password.",
    )
    credentials_reason: str = Field("", max_length=512, description="Why Redis users are not created for each service.")
    prediction_error_percent: Annotated[int, Field(ge=0, le=100)] | None = Field(
        None, description="How far the index was off lately about a worker's cache, in percent of a prompt, in tens: the worst worker."
    )


class CanaryStatus(Part):
    """A new revision that is not everybody's yet."""

    revision: str = Field(max_length=64, description="The revision that is tried; what spec.rollout.canary.promote takes.")
    phase: Literal["Waiting", "Starting", "Judging", "Paused", "Promoting", "Failed"] = Field(
        description="Waiting: for the routers; Starting: its pods; Paused: until promote names it; Promoting: old pods are being replaced; "
        "Failed: rolled back."
    )
    weight: int = Field(0, ge=0, le=100, description="Percent of the requests that are for it.")


class ScalingStatus(Part):
    """What the operator's own autoscaler has decided."""

    wanted: int = Field(ge=0, description="Workers.")
    reason: str = Field("", max_length=256, description="Why so many: the last change, and what it was for.")


class ServiceStatus(Part):
    """What the operator saw last."""

    observed_generation: int = Field(0, ge=0, description="The generation of the service that this status speaks of.")
    url: str = Field("", max_length=512, description="The OpenAI-compatible base URL inside the cluster.")
    model: str = Field("", max_length=253, description='What clients send as "model".')
    ready: str = Field("", max_length=32, description="Workers ready / wanted.")
    replicas: int = Field(0, ge=0, description="Workers that exist.")
    ready_replicas: int = Field(0, ge=0, description="Workers that are ready.")
    updated_replicas: int = Field(0, ge=0, description="Workers of the wanted revision.")
    selector: str = Field("", max_length=1024, description="Label selector of the workers, for autoscalers.")
    revision: str = Field("", max_length=128, description="The wanted revision: a digest of what the spec says about worker pods.")
    loading: LoadingStatus | None = Field(None, description="How far the worker is that is furthest behind; absent while none loads.")
    index: IndexStatus | None = Field(None, description="The prefix index as one router sees it; absent while no router is ready.")
    traffic: TrafficStatus | None = Field(None, description="What went through lately; absent until a router was asked twice.")
    canary: CanaryStatus | None = Field(None, description="A new revision that is tried; absent while none is.")
    scaling: ScalingStatus | None = Field(None, description="With spec.scaling.target: how many workers the operator wants, and why.")
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="Ready, Available, Progressing, WeightsReady, Routable, PodTemplateValid, Degraded; GatewayReady with a gateway.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
