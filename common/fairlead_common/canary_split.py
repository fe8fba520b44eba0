"""The canary's split, as operator and routers speak of it: the file that says the weight, and the page that says how both sides fare."""

import math
from typing import Annotated

import msgspec

_PER_DOUBLING = 8
"""Buckets for each doubling of a duration: a quantile is off by 4 % at most."""
_SMALLEST = 1e-3


class Split(msgspec.Struct, frozen=True):
    """What routers are told: `weight` percent of the requests are for the pods that are the canary of `revision`. Empty: there is none."""

    revision: str = ""
    weight: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    trial: str = ""
    """Another one when the same revision is tried again: what was counted before counts no more."""


class Durations(msgspec.Struct):
    """How many durations fell into each bucket; buckets grow by 9 %, from a millisecond."""

    buckets: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        bucket = math.floor(_PER_DOUBLING * math.log2(max(seconds, _SMALLEST) / _SMALLEST))
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def include(self, other: "Durations") -> None:
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count

    @property
    def count(self) -> int:
        return sum(self.buckets.values())

    def quantile(self, share: float) -> float:
        """Seconds that `share` (0 to 1) of the durations took at most, to the middle of their bucket; 0 where there is none."""
        rank, seen = math.ceil(share * self.count), 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= rank:
                return float(_SMALLEST * 2 ** ((bucket + 0.5) / _PER_DOUBLING))
        return 0.0


class Side(msgspec.Struct):
    """How requests fared at the pods of one side since the split began, as one router saw it, or several together."""

    requests: int = 0
    """Attempts that the pods took or should have taken; not those that a draining or full pod turned away."""
    errors: int = 0
    """Of them: status 5xx, no answer, a connection refused, an answer that broke off."""
    ttft: Durations = msgspec.field(default_factory=Durations)
    """From sending to the first byte of an answer 2xx, which comes with the first token."""

    def include(self, other: "Side") -> None:
        self.requests += other.requests
        self.errors += other.errors
        self.ttft.include(other.ttft)

    @property
    def error_rate(self) -> float:
        """0 to 1."""
        return self.errors / self.requests if self.requests else 0.0


class SplitReport(msgspec.Struct):
    """`GET /fairlead/split` of a router. Counted since the router learned of this trial of this revision."""

    revision: str = ""
    weight: int = 0
    trial: str = ""
    canary: Side = msgspec.field(default_factory=Side)
    stable: Side = msgspec.field(default_factory=Side)

    def describes(self, split: Split) -> bool:
        """Whatever the weight is."""
        return bool(split.revision) and (self.revision, self.trial) == (split.revision, split.trial)

    def include(self, other: "SplitReport") -> None:
        """Another router's, of the same split."""
        self.canary.include(other.canary)
        self.stable.include(other.stable)
