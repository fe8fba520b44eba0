"""The canary split shared by operator and routers: the file with the weight, and the report with the results of both sides."""

import math
from typing import Annotated

import msgspec

_PER_DOUBLING = 8
"""Buckets per doubling of a duration: the error of a quantile is at most 4 %."""
_SMALLEST = 1e-3


class Split(msgspec.Struct, frozen=True):
    """Sends `weight` percent of the requests to the canary pods of `revision`. An empty revision means no canary."""

    revision: str = ""
    weight: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    trial: str = ""
    """Changes when the same revision is tried again; earlier counts no longer apply."""


class Durations(msgspec.Struct):
    """Counts of durations by bucket. Buckets grow by 9 %, from a millisecond."""

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
        """Return the quantile `share` (0 to 1) in seconds, as the middle of its bucket; 0 without durations."""
        rank, seen = math.ceil(share * self.count), 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= rank:
                return float(_SMALLEST * 2 ** ((bucket + 0.5) / _PER_DOUBLING))
        return 0.0


class Side(msgspec.Struct):
    """Results of requests to the pods of one side since the split began, of one router or several together."""

    requests: int = 0
    """Attempts that the pods accepted or should have accepted, without those that a draining or full pod rejected."""
    errors: int = 0
    """Failed attempts: status 5xx, no response, a refused connection, a truncated response."""
    ttft: Durations = msgspec.field(default_factory=Durations)
    """From sending to the first byte of a 2xx response, which comes with the first token."""

    def include(self, other: "Side") -> None:
        self.requests += other.requests
        self.errors += other.errors
        self.ttft.include(other.ttft)

    @property
    def error_rate(self) -> float:
        """Share of failed attempts, 0 to 1."""
        return self.errors / self.requests if self.requests else 0.0


class SplitReport(msgspec.Struct):
    """Reply of a router to `GET /fairlead/split`, counted since the router learned of this trial of this revision."""

    revision: str = ""
    weight: int = 0
    trial: str = ""
    canary: Side = msgspec.field(default_factory=Side)
    stable: Side = msgspec.field(default_factory=Side)

    def describes(self, split: Split) -> bool:
        """Return whether the report is about this revision and trial, with any weight."""
        return bool(split.revision) and (self.revision, self.trial) == (split.revision, split.trial)

    def include(self, other: "SplitReport") -> None:
        """Add another router's report of the same split."""
        self.canary.include(other.canary)
        self.stable.include(other.stable)
