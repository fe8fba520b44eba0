"""The orders of waiting requests of equal priority. The manifest, the worker and the operator use this list alone."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

SchedulingPolicy = Literal["LongestPrefixMatch", "FirstComeFirstServed"]
"""Names in manifests."""
PolicyName = Literal["lpm", "fcfs"]
"""Names in flags."""
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


class PolicyDefinition(NamedTuple):
    """The name of one policy in the flags of each engine, and what others must know of it.

    None: the engine does not have it, so the API server refuses it for this engine.
    """

    fairlead: PolicyName
    vllm: Literal["priority"] | None
    """vLLM's `priority` runs requests of equal priority by arrival. Its `fcfs` would ignore priorities."""
    sglang: Literal["lpm", "fcfs"] | None
    order: str
    """What comes first, in two or three words, for `--help`."""
    is_cached_first: bool
    """Prompts of which more is cached go first. Routers then expect that they wait less (`serving/slo_gate.py`)."""


DEFINITIONS: Mapping[SchedulingPolicy, PolicyDefinition] = {
    "LongestPrefixMatch": PolicyDefinition("lpm", None, "lpm", "longest cached prefix", is_cached_first=True),
    "FirstComeFirstServed": PolicyDefinition("fcfs", "priority", "fcfs", "arrival", is_cached_first=False),
}
CACHED_FIRST: frozenset[str] = frozenset(policy.fairlead for policy in DEFINITIONS.values() if policy.is_cached_first)
ORDERS = ", ".join(f"{policy.order} ({policy.fairlead})" for policy in DEFINITIONS.values())
