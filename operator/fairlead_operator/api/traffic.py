"""`status.traffic`: what the workers did lately, coarsely."""

from typing import Annotated

from pydantic import Field

from fairlead_operator.api.fields import Part


class TrafficStatus(Part):
    """Written at most once a minute, and only when a figure has changed by more than a tenth: an idle service causes no write."""

    tokens_per_second: int = Field(0, ge=0, description="Tokens generated a second, all workers.")
    prompt_tokens_per_second: int = Field(0, ge=0, description="Prompt tokens taken in a second, cached ones included.")
    cache_hit_percent: Annotated[int, Field(ge=0, le=100)] | None = Field(
        None, description="Share of prompt tokens found in the KV caches, when there last were any."
    )
    at: str = Field("", json_schema_extra={"format": "date-time"}, max_length=64, description="When this was written.")
