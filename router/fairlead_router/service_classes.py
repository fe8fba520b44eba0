"""Service classes (`--slo-classes`): the urgency of a request, and the bounds within which it is to be served.

A class without bounds is best effort. Requests without a class have no bounds and are not best effort.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.alias_generators import to_camel

NAME = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
"""Names are safe in a header, a log and a metric's label."""
MAX_CLASSES = 16
LEAST_URGENT = 1000

Milliseconds = Annotated[int, Field(ge=1, le=3_600_000)]


class ServiceClass(BaseModel):
    """One class. The time to first token (TTFT) may be `ttft_milliseconds`, plus `…_per_thousand_tokens` for 1,000 uncached prompt tokens.

    `itl_milliseconds`: bound of the mean inter-token latency (ITL) of a stream. Lower `priority` goes first.
    """

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(pattern=NAME)]
    priority: Annotated[int, Field(ge=-LEAST_URGENT, le=LEAST_URGENT)] = 0
    ttft_milliseconds: Milliseconds | None = None
    ttft_milliseconds_per_thousand_tokens: Milliseconds | None = None
    itl_milliseconds: Milliseconds | None = None

    @model_validator(mode="after")
    def _has_constant_part(self) -> Self:
        if self.ttft_milliseconds_per_thousand_tokens is not None and self.ttft_milliseconds is None:
            raise ValueError("ttftMillisecondsPerThousandTokens needs ttftMilliseconds, since a cached prompt would have no time: add it")
        return self

    @property
    def bounds_ttft(self) -> bool:
        return self.ttft_milliseconds is not None

    @property
    def is_best_effort(self) -> bool:
        return not self.bounds_ttft and self.itl_milliseconds is None

    @property
    def urgency(self) -> tuple[bool, int]:
        """Sort key: every best-effort class is less urgent than every other class."""
        return self.is_best_effort, self.priority

    def ttft_bound(self, uncached_tokens: float) -> float:
        """Return the longest time to first token, in seconds, of a class that bounds it."""
        slope = self.ttft_milliseconds_per_thousand_tokens or 0
        return ((self.ttft_milliseconds or 0) + slope * uncached_tokens / 1000) / 1000

    @property
    def itl_bound(self) -> float:
        """Return the longest mean ITL in seconds; infinity: no bound."""
        return float("inf") if self.itl_milliseconds is None else self.itl_milliseconds / 1000


BATCH = ServiceClass(name="batch", priority=LEAST_URGENT)
"""Built-in class: best effort, with the lowest urgency. A class of the user with this name replaces it."""

_CLASSES = TypeAdapter(list[ServiceClass])


class ServiceClasses:
    """All classes by name, and the default class (None: requests that name no class have none)."""

    def __init__(self, classes: Iterable[ServiceClass] = (), default: str = "") -> None:
        """Raises ValueError for an unknown default class."""
        self.by_name = {BATCH.name: BATCH} | {each.name: each for each in classes}
        if default and default not in self.by_name:
            raise ValueError(f"no class has this name: add it to --slo-classes, or choose one of {self.names}")
        self.default = self.by_name.get(default)
        self.least_itl = min((each.itl_bound for each in self.by_name.values()), default=float("inf"))
        """Tightest bound of the ITL, in seconds: best-effort work must leave it to the others."""

    @property
    def names(self) -> str:
        return ", ".join(self.by_name)


def parse_classes(text: str) -> list[ServiceClass]:
    """Return the classes of a JSON list, with the keys of `spec.slo.classes`. Raises ValueError that names the key and the fix."""
    if not text:
        return []
    try:
        classes = _CLASSES.validate_json(text)
    except ValidationError as error:
        raise ValueError("; ".join(map(_describe, error.errors(include_url=False)))) from None
    names = [each.name for each in classes]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"the name {duplicates[0]!r} occurs twice: rename one class")
    if len(classes) > MAX_CLASSES:
        raise ValueError(f"there are {len(classes)} classes, and at most {MAX_CLASSES} are supported: remove some")
    return classes


def _describe(problem: Any) -> str:
    """Return one problem of pydantic with the key's path: `[0].ttftMilliseconds must be …`."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"])
    fixes = {
        "json_invalid": 'give a JSON list such as [{"name":"chat","ttftMilliseconds":500}]',
        "list_type": 'give a JSON list such as [{"name":"chat","ttftMilliseconds":500}]',
        "missing": "is missing: add it",
        "extra_forbidden": f"is unknown: use {', '.join(field.alias or name for name, field in ServiceClass.model_fields.items())}",
        "string_pattern_mismatch": "must be lower-case letters, digits and '-', at most 63: rename the class",
    }
    got = "" if problem["type"] in ("json_invalid", "list_type", "missing", "value_error") else f" (got {str(problem['input'])[:60]!r})"
    return f"{path} {fixes.get(problem['type'], problem['msg'].removeprefix('Value error, '))}{got}".strip()
