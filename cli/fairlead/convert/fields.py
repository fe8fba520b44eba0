"""The fields that were renamed within v1alpha1 after commit 7e6be7f, and how their values are written now. Pure.

A spec that has the present names stays as it is, so a conversion may be repeated.
"""

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

Convert = Callable[[Any], Any]
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


class NotConvertible(ValueError):
    """A value has no equivalent now. The message names the field and what to do."""


def seconds(duration: Any) -> Any:
    """Return a duration such as `1h30m` in whole seconds, rounded up; other values unchanged."""
    if not isinstance(duration, str):
        return duration
    return int(-(-_read(duration) // 1))


def milliseconds(duration: Any) -> Any:
    """Return a duration such as `2s` in milliseconds; other values unchanged."""
    if not isinstance(duration, str):
        return duration
    return round(_read(duration) * 1000)


def _read(duration: str) -> float:
    """Return the seconds of a duration. Raises ValueError."""
    if not re.fullmatch(r"([0-9]+(ms|h|m|s))+", duration):
        raise ValueError(f"{duration!r} is no duration such as 1h30m: write it with the units h, m, s and ms")
    return sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"([0-9]+)(ms|h|m|s)", duration))


def one_of(**names: str) -> Convert:
    """Return a conversion of enum values; values of the present enum stay."""
    return lambda value: names.get(value, value) if isinstance(value, str) else value


def positive(convert: Convert = lambda value: value) -> Convert:
    """Return a conversion after which 0, the earlier word for "none", is absent."""
    return lambda value: convert(value) or None


def percent_of(share: Any) -> Any:
    """Return a share such as 0.01 as a percentage: `1%`."""
    return share if isinstance(share, str) else f"{round(share * 100, 2):g}%"


@dataclass(frozen=True)
class Renamed:
    """A field: its earlier path below spec, its present one, and the conversion of its value. None as a result removes the field."""

    before: str
    now: str
    convert: Convert = lambda value: value


FIELDS = (
    Renamed("disruption", "podDisruptionBudget"),
    Renamed("engine.itlTargetMs", "engine.itlTargetMilliseconds", positive()),
    Renamed("engine.policy", "engine.schedulingPolicy", one_of(lpm="LongestPrefixMatch", fcfs="FirstComeFirstServed")),
    Renamed("engine.speculative.method", "engine.speculativeDecoding.method", one_of(ngram="NGram", draft="Draft")),
    Renamed("engine.speculative.numTokens", "engine.speculativeDecoding.numTokens"),
    Renamed("engine.speculative.model", "engine.speculativeDecoding.draftModelURI"),
    Renamed("engine.warmTokens", "engine.warmupTokens"),
    Renamed("engine.warmSeconds", "engine.warmupTimeoutSeconds"),
    Renamed(
        "engine.attentionBackend",
        "engine.attentionBackend",
        one_of(auto="Auto", flashinfer="FlashInfer", native="Native", cpu="CPU", reference="Reference"),
    ),
    Renamed("engine.dtype", "engine.dtype", one_of(auto="Auto", float32="Float32", bfloat16="BFloat16", float16="Float16")),
    Renamed("engine.quantization", "engine.quantization", one_of(none="None", int8="Int8")),
    *(Renamed(f"engine.{name}", f"engine.{name}", positive()) for name in ("maxModelLen", "threads", "prefillMaxRequests")),
    *(Renamed(f"exposure.gateway.{name}", f"exposure.gateway.parentRef.{name}") for name in ("name", "namespace", "sectionName")),
    Renamed("exposure.gateway.timeout", "exposure.gateway.timeoutSeconds", positive(seconds)),
    Renamed("exposure.networkPolicy", "exposure.networkPolicy", lambda value: {True: "Managed", False: "None"}.get(value, value)),
    Renamed("model.cache.claim", "model.cache.persistentVolumeClaim.claimName"),
    Renamed("model.cache.size", "model.cache.emptyDir.sizeLimit"),
    Renamed("model.cache.hostPath", "model.cache.hostPath", lambda value: {"path": value} if isinstance(value, str) else value),
    Renamed("rollout.canary.weight", "rollout.canary.trafficPercent"),
    Renamed("rollout.canary.promote", "rollout.canary.promotedRevision"),
    Renamed("rollout.canary.maxErrorRate", "rollout.canary.maxErrorRateIncrease", percent_of),
    Renamed("rollout.canary.maxTtftRatio", "rollout.canary.maxTTFTIncrease", lambda ratio: percent_of(ratio - 1)),
    *(Renamed(f"rollout.{name}", f"rollout.{name}Seconds", seconds) for name in ("drainTimeout", "progressDeadline", "surgeTimeout")),
    Renamed("routing.holdTimeout", "routing.holdTimeoutSeconds", seconds),
    Renamed("routing.steering", "routing.forwardingMode"),
    Renamed("routing.metricsNames", "routing.metricsNames", one_of(vLLM="VLLM")),
    Renamed("scaling.min", "scaling.minReplicas"),
    Renamed("scaling.max", "scaling.maxReplicas"),
    Renamed("scaling.idleAfter", "scaling.idleTimeoutSeconds", seconds),
    Renamed("scaling.scaleDownStabilization", "scaling.scaleDown.stabilizationWindowSeconds", seconds),
    Renamed("scaling.target.ttft", "scaling.target.ttftMilliseconds", milliseconds),
)


def convert_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec with the present names. Raises NotConvertible."""
    made: dict[str, Any] = deepcopy(dict(spec))
    for field in FIELDS:
        value = _take(made, field.before)
        if value is not None and (converted := _convert(field.before, field.convert, value)) is not None:
            if field.now != field.before and _look(made, field.now) is not None:
                raise NotConvertible(f"spec.{field.before} and spec.{field.now} are both set: keep the latter")
            _put(made, field.now, converted)
    _convert_pause(made)
    _convert_bound(made)
    _check_speculative(made)
    return made


def add_earlier_names(message: str) -> str:
    """Return a message about a spec with the earlier path after each field that was renamed."""
    for field in FIELDS:
        if field.before != field.now:
            pattern = rf"(?<![\w.])spec\.{re.escape(field.now)}(?![\w.]*\w)"
            message = re.sub(pattern, f"spec.{field.now} (earlier spec.{field.before})", message)
    return message


def _convert(path: str, convert: Convert, value: Any) -> Any:
    try:
        return convert(value)
    except (ValueError, TypeError) as error:
        raise NotConvertible(f"spec.{path}: {error}") from None


def _check_speculative(spec: dict[str, Any]) -> None:
    """Refuse the fields of `engine.speculative` that no version knows."""
    left = _take(spec, "engine.speculative")
    if not left:
        return
    names = ", ".join(f"{field.before.rpartition('.')[2]} (now {field.now})" for field in FIELDS if "speculative." in field.before)
    wrong = f"spec.engine.speculative.{next(iter(left))}" if isinstance(left, Mapping) else f"spec.engine.speculative {left!r}"
    raise NotConvertible(f"{wrong}: the earlier section has {names}: remove or correct it")


def _convert_pause(spec: dict[str, Any]) -> None:
    """Split the canary's `pause`, which was a duration or Manual."""
    pause = _take(spec, "rollout.canary.pause")
    if pause == "Manual":
        _put(spec, "rollout.canary.promotion", "Manual")
    elif pause is not None:
        _put(spec, "rollout.canary.analysisSeconds", _convert("rollout.canary.pause", seconds, pause))


def _convert_bound(spec: dict[str, Any]) -> None:
    """Express `routing.maxExpectedTtft` as the bound of a default class."""
    bound = _take(spec, "routing.maxExpectedTtft")
    if bound is None:
        return
    if spec.get("slo"):
        raise NotConvertible("spec.routing.maxExpectedTtft and spec.slo are both set: write the bound as ttftMilliseconds of a class")
    spec["slo"] = {
        "classes": [{"name": "default", "ttftMilliseconds": _convert("routing.maxExpectedTtft", milliseconds, bound)}],
        "defaultClass": "default",
    }


def _look(spec: Any, path: str) -> Any:
    for name in path.split("."):
        spec = spec.get(name) if isinstance(spec, Mapping) else None
    return spec


def _take(spec: dict[str, Any], path: str) -> Any:
    """Remove the field at `path` and the parents that it leaves empty; return its value (None: there is none)."""
    parents, node = [], spec
    *names, last = path.split(".")
    for name in names:
        if not isinstance(node.get(name), dict):
            return None
        parents.append((node, name))
        node = node[name]
    value = node.pop(last, None)
    for parent, name in reversed(parents):
        if value is not None and not parent[name] and name == "speculative":
            del parent[name]  # the only section that was renamed
    return value


def _put(spec: dict[str, Any], path: str, value: Any) -> None:
    *names, last = path.split(".")
    for name in names:
        spec = spec.setdefault(name, {})
    spec[last] = value
