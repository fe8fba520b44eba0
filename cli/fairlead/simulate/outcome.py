"""The result of one replay."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fairlead.simulate.service_classes import Objective, ServiceClass


@dataclass(slots=True)
class Outcome:
    """Per request: its objective, TTFT and mean ITL in seconds, which are nan without an answer. Per pod: computed prompt tokens.

    `seconds`: from the first to the last arrival. `ended_at`: the end of the last answer.
    `pod_seconds`: of all pods, from their creation to their end.
    """

    policy: str
    classes: Sequence[ServiceClass]
    objectives: Sequence[Objective]
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    hit_rate: float = 0.0
    seconds: float = 0.0
    ended_at: float = 0.0
    pod_seconds: float = 0.0
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """The number of pods from each moment on, starting and draining ones included."""

    @property
    def imbalance(self) -> float:
        """Prefill tokens of the busiest pod divided by the mean."""
        return max(self.computed) * len(self.computed) / max(1, sum(self.computed))

    @property
    def served(self) -> list[float]:
        """TTFT of the requests with a first token."""
        return [seconds for seconds in self.ttft if not math.isnan(seconds)]

    def met(self, service_class: int | None = None) -> int:
        """Return how many requests, of a class or of all, got their whole answer within their bounds."""
        return sum(
            ttft <= objective.ttft and itl <= objective.itl
            for objective, ttft, itl in zip(self.objectives, self.ttft, self.itl, strict=True)
            if service_class is None or objective.service_class == service_class
        )

    def figures(self) -> dict[str, float]:
        times = sorted(self.served) or [math.nan]
        spans = [seconds for seconds in self.itl if not math.isnan(seconds)] or [math.nan]
        seconds = max(self.seconds, 1e-9)

        def percentile(share: float) -> float:
            return times[min(len(times) - 1, int(share * len(times)))]

        figures = {
            "hit_rate": self.hit_rate,
            "ttft_mean": sum(times) / len(times),
            "ttft_p50": percentile(0.5),
            "ttft_p90": percentile(0.9),
            "ttft_p99": percentile(0.99),
            "itl_mean": sum(spans) / len(spans),
            "imbalance": self.imbalance,
            "lost": float(sum(map(math.isnan, self.itl))),
            "goodput": self.met() / seconds,
            "good_share": self.met() / len(self.ttft),
            "pod_hours": self.pod_seconds / 3600,
            "good_per_pod_hour": self.met() / max(self.pod_seconds / 3600, 1e-9),
        }
        if len(self.classes) > 1:
            figures |= {f"goodput_{one.name}": self.met(number) / seconds for number, one in enumerate(self.classes)}
        return figures
