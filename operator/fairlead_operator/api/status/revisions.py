"""`status.revisions`, `status.imageUpdate` and `status.modelCommit`: what the pods run, and whether newer images wait."""

from typing import Annotated, Literal

from pydantic import Field

from fairlead_operator.api.fields import Part

UpdatePhase = Literal["Current", "Pinned", "Held", "Waiting", "RollingOut", "Observing", "RollingBack", "Failed"]
Text = Annotated[str, Field(max_length=512)]
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]


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
        description="Pinned, Held (paused), Waiting: newer images exist. Observing: serves and is judged. Failed: went back.",
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
