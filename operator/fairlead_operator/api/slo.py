"""`spec.slo`: service classes of requests, and the bounds within which routers admit them."""

from typing import Annotated

from pydantic import Field

from fairlead_operator.api.fields import DNS_LABEL, Part, list_map, refuse, rule, ruled

BATCH = "batch"
"""Class that every service has."""
_SLOPE = "spec.slo.classes.ttftMillisecondsPerThousandTokens needs ttftMilliseconds: add it"
_DEFAULT = "spec.slo.defaultClass must be batch or a name in spec.slo.classes: add the class, or change the name"
_SAME_NAMES = "spec.slo.classes must not contain a name twice, since requests select by name: rename one class"

ClassName = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
Milliseconds = Annotated[int, Field(ge=1, le=3_600_000)]


class SloClass(Part):
    """A class without bounds is best effort: it gets what others leave."""

    model_config = ruled(
        rule("!has(self.ttftMillisecondsPerThousandTokens) || has(self.ttftMilliseconds)", _SLOPE, path=".ttftMilliseconds")
    )

    name: ClassName = Field(description="Value of X-SLO-Class in requests.")
    priority: int = Field(0, ge=-1000, le=1000, description="Lower goes first.")
    ttft_milliseconds: Milliseconds | None = Field(None, description="Bound of the time to first token; beyond it: 429.")
    ttft_milliseconds_per_thousand_tokens: Milliseconds | None = Field(None, description="More time for each 1,000 uncached prompt tokens.")
    itl_milliseconds: Milliseconds | None = Field(None, description="Bound of the mean inter-token latency.")

    def check_rules(self) -> None:
        refuse(
            self.ttft_milliseconds_per_thousand_tokens is not None and self.ttft_milliseconds is None, f"{_SLOPE} (got class {self.name})"
        )


class Slo(Part):
    """Service classes."""

    model_config = ruled(
        rule(
            "!has(self.defaultClass) || self.defaultClass == 'batch' || "
            "(has(self.classes) && self.classes.exists(one, one.name == self.defaultClass))",
            _DEFAULT,
            path=".defaultClass",
        )
    )

    classes: list[SloClass] = Field(
        default_factory=list,
        max_length=16,
        description="Classes; one without bounds is best effort. There is also batch, of priority 1000.",
        json_schema_extra=list_map("name"),
    )
    default_class: ClassName | None = Field(None, description="Class of requests and keys that name none.")

    def check_rules(self) -> None:
        names = [one.name for one in self.classes]
        repeated = sorted({name for name in names if names.count(name) > 1})
        refuse(bool(repeated), f"{_SAME_NAMES} (got {', '.join(repeated)})")
        refuse(self.default_class not in (None, BATCH, *names), f"{_DEFAULT} (got {self.default_class})")
