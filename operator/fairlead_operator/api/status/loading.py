"""`status.loading`: load progress of the slowest worker."""

from typing import Annotated, Literal

from pydantic import Field

from fairlead_operator.api.fields import Part

Phase = Literal["Starting", "Waiting", "Downloading", "Loading", "Preparing", "Warming"]


class LoadingStatus(Part):
    """Load progress of the slowest worker. Coarse by design: a load of one hour causes some dozens of writes."""

    phase: Phase = Field(
        description="Waiting: for a download or other nodes. Loading: weights. Preparing: kernels, KV pages. Warming: prefixes of other "
        "workers."
    )
    percent: int = Field(0, ge=0, le=100, description="Progress within this phase, in steps of 5.")
    total_bytes: Annotated[int, Field(ge=0)] | None = Field(None, description="Size that percent refers to. Absent: unknown.")
    pod_name: str = Field("", max_length=253, description="Name of the pod.")
