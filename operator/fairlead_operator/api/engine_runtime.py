"""`spec.engine.runtime`: whose engine runs in the workers, and which settings of `spec.engine` each of them has.

vLLM and SGLang run beside `fairlead-agent`, which speaks the worker's protocol for them. A setting that has an equal flag there is passed
(children/engine_flags.py). Every other one is in `UNSUPPORTED`, from which the CEL rules, the same checks in Python and the support matrix
of the documentation are made.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from fairlead_common.scheduling_policy import DEFINITIONS, SchedulingPolicy
from fairlead_operator.api.fields import Part, refuse, rule, ruled

Runtime = Literal["Fairlead", "VLLM", "SGLang"]
ENGINES: tuple[Runtime, ...] = ("VLLM", "SGLang")
"""Runtimes whose engine is not Fairlead's."""
_ARGS = "use spec.engine.args"
_STORED_CHUNK = 512
"""Default of chunkedPrefillSize until December 2026, which services of that time have stored."""


@dataclass(frozen=True)
class Unsupported:
    """A field below `spec.engine` that must have its default, or a value of `allowed`, with these runtimes."""

    field: str
    instead: str
    runtimes: tuple[Runtime, ...] = ENGINES
    allowed: tuple[str | int, ...] = ()

    @property
    def message(self) -> str:
        but = f" (except {', '.join(map(str, self.allowed))})" if self.allowed else ""
        return f"spec.engine.{self.field}{but} is not for runtime {' and '.join(self.runtimes)}: {self.instead}"


_VLLM_POLICIES = tuple(name for name, policy in DEFINITIONS.items() if policy.vllm is not None)
_SGLANG_POLICIES = tuple(name for name, policy in DEFINITIONS.items() if policy.sglang is not None)


def _refuse_policies(runtime: Runtime, allowed: tuple[SchedulingPolicy, ...], instead: str) -> list[Unsupported]:
    """Return the refusal of the policies that the engine does not have; none if it has all."""
    return [Unsupported("schedulingPolicy", instead, (runtime,), allowed)] if len(allowed) < len(DEFINITIONS) else []


UNSUPPORTED = (
    Unsupported("nodes", "set it to 1, and use the GPUs of one node (tensorParallel)"),
    Unsupported("kvCache.blockTokens", "the index has the engine's own blocks. Set spec.engine.kvCache.pageTokens"),
    Unsupported("kvCache.hostSize", f"remove it, and {_ARGS} (--kv-offloading-size, --enable-hierarchical-cache)"),
    Unsupported("kvCache.size", f"set spec.engine.kvCache.pages, or {_ARGS} (--mem-fraction-static)", ("SGLang",)),
    Unsupported("speculativeDecoding", f"remove it, and {_ARGS}"),
    Unsupported("quantization", "others quantize in Fairlead's engine. Name a quantized checkpoint in spec.model.uri", allowed=("FP8",)),
    Unsupported("threads", "set OMP_NUM_THREADS in spec.engine.env"),
    Unsupported("warmupTokens", "remove it: new workers start with an empty KV cache"),
    Unsupported("itlTargetMilliseconds", "remove it: only Fairlead's scheduler sizes chunks by a latency"),
    Unsupported("maxWaitingRequests", "remove it: bound the queue in the routers with spec.slo"),
    Unsupported("chunkedPrefillSize", "set spec.engine.maxPrefillTokens, which bounds the tokens of one step", ("VLLM",), (_STORED_CHUNK,)),
    *_refuse_policies("VLLM", _VLLM_POLICIES, "its waiting requests run by priority, then by arrival. Remove it"),
    *_refuse_policies("SGLang", _SGLANG_POLICIES, "SGLang does not have this order. Remove it"),
)


def engine_rules(engine: type[BaseModel]) -> list[dict[str, str]]:
    """Return the CEL rules of `UNSUPPORTED` for the model of `spec.engine`."""
    return [
        rule(f"!(self.runtime in {_quote(one.runtimes)}) || {_condition(engine, one)}", one.message, path=f".{one.field}")
        for one in UNSUPPORTED
    ]


def refuse_unsupported(engine: Any) -> None:
    """Apply the same rules to a parsed `spec.engine`. Raises ValueError for the first that is broken."""
    for one in UNSUPPORTED:
        if engine.runtime in one.runtimes:
            part, field = _look(engine, one.field)
            value = getattr(part, field)
            refuse(value not in (_default(type(part), field), *one.allowed), f"{one.message} (got {_shown(value)})")


def _condition(engine: type[BaseModel], one: Unsupported) -> str:
    part: Any = engine
    *parents, last = one.field.split(".")
    for name in parents:
        part = type(_default(part, _attribute(part, name)))
    default = _default(part, _attribute(part, last))
    if default is None:
        return f"!has(self.{one.field})" + (f" || self.{one.field} in {_quote(one.allowed)}" if one.allowed else "")
    if isinstance(default, str):
        return f"self.{one.field} in {_quote((default, *one.allowed))}"
    return f"self.{one.field} == {default}"


def _look(part: Any, path: str) -> tuple[Any, str]:
    """Return the model that holds the field at `path`, and the name of its attribute."""
    *parents, last = path.split(".")
    for name in parents:
        part = getattr(part, _attribute(type(part), name))
    return part, _attribute(type(part), last)


def _attribute(part: type[BaseModel], alias: str) -> str:
    return next(name for name, field in part.model_fields.items() if field.alias == alias)


def _default(part: type[BaseModel], attribute: str) -> Any:
    return part.model_fields[attribute].get_default(call_default_factory=True)


def _quote(values: tuple[str | int, ...]) -> str:
    return "[" + ", ".join(str(value) if isinstance(value, int) else f"'{value}'" for value in values) + "]"


def _shown(value: object) -> str:
    return "a section" if isinstance(value, BaseModel) else str(value)


_ONE_VALUE = "spec.engine.env: each variable needs exactly one of value and valueFrom"


class EnvironmentVariable(Part):
    """A variable of the engine's container."""

    model_config = ruled(rule("has(self.value) != has(self.valueFrom)", _ONE_VALUE))

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = Field(description="Name.")
    value: Annotated[str, Field(max_length=4096)] | None = Field(None, description="Value; may be empty.")
    value_from: dict[str, Any] | None = Field(
        None,
        description="Source of the value, such as secretKeyRef, as in a PodSpec.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True, "maxProperties": 1, "additionalProperties": False},
    )

    def check_rules(self) -> None:
        refuse((self.value is None) == (self.value_from is None), f"{_ONE_VALUE} ({self.name})")
