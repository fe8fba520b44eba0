"""`status.loading`: how far the pod is that everybody waits for."""

from typing import Literal

from pydantic import Field

from fairlead_operator.api.fields import Part

Phase = Literal["Starting", "Waiting", "Downloading", "Loading", "Preparing", "Warming"]


class LoadingStatus(Part):
    """The load of the worker that is furthest behind. Coarse on purpose: a load of an hour is some dozens of writes."""

    phase: Phase = Field(
        description="Waiting: for a download or other nodes; Loading: weights; Preparing: kernels, KV pages; Warming: peers' prefixes."
    )
    percent: int = Field(0, ge=0, le=100, description="Of this phase, in steps of five.")
    total_bytes: int = Field(0, ge=0, description="Bytes that percent is of; 0: not counted.")
    pod: str = Field("", max_length=253, description="Which.")
