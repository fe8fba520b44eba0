"""`status.traffic`: recent token rates of the workers, rounded."""

from typing import Annotated

from pydantic import Field

from fairlead_operator.api.fields import Part


class TrafficStatus(Part):
    """Written at most once a minute, and only when a figure changes by more than a tenth. An idle service causes no writes."""

    tokens_per_second: int = Field(0, ge=0, description="Tokens generated per second by all workers.")
    prompt_tokens_per_second: int = Field(0, ge=0, description="Prompt tokens received per second, cached tokens included.")
    cache_hit_percent: Annotated[int, Field(ge=0, le=100)] | None = Field(None, description="Percent of prompt tokens found in KV caches.")
    last_update_time: str = Field(
        "", json_schema_extra={"format": "date-time"}, max_length=64, description="When these figures were written."
    )
