"""The orders of waiting requests of equal priority. The manifest, the worker and the operator use this list alone."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

SchedulingPolicy = Literal["LongestPrefixMatch", "FirstComeFirstServed"]
"""Names in manifests."""
PolicyName = Literal["lpm", "fcfs"]
"""Names in flags."""
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


class EngineNames(NamedTuple):
    """The name of one policy in the flags of each engine. None: the engine does not have it, so the API server refuses it."""

    fairlead: PolicyName
    vllm: Literal["priority"] | None
    """vLLM's `priority` runs requests of equal priority by arrival. Its `fcfs` would ignore priorities."""
    sglang: Literal["lpm", "fcfs"]


ENGINE_NAMES: Mapping[SchedulingPolicy, EngineNames] = {
    "LongestPrefixMatch": EngineNames("lpm", None, "lpm"),
    "FirstComeFirstServed": EngineNames("fcfs", "priority", "fcfs"),
}
