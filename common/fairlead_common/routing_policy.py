"""The policies by which routers choose a worker. The manifest, the router, the tests and the documentation use this list alone."""

from collections.abc import Mapping
from typing import Literal

RoutingPolicy = Literal["PrefixAware", "LeastLoad", "Random", "RoundRobin", "Session"]
CHOICES: Mapping[RoutingPolicy, str] = {
    "PrefixAware": "the worker that starts first, given its cached prefixes",
    "LeastLoad": "the shortest expected wait",
    "Random": "any",
    "RoundRobin": "in turn",
    "Session": "the same for each session or user",
}
"""What each chooses, for `--help` and the CRD."""
DESCRIPTION = "; ".join(f"{name}: {choice}" for name, choice in CHOICES.items())
