"""Service classes: the bounds of a request's latency, and which requests met them."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from fairlead.errors import UserError
from fairlead.simulate.workloads.request import Request, necessary_each
from fairlead_router.service_classes import ServiceClass as RouterClass


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """`share` of the requests have: TTFT <= `ttft` seconds + `ttft_per_token` for each uncached token, and mean ITL <= `itl` seconds.

    Uncached tokens are those that even one unlimited cache would not have, so that the bound is the same for every policy.
    """

    name: str
    share: float = 1.0
    ttft: float = 2.0
    ttft_per_token: float = 0.0005
    itl: float = 0.1

    def for_router(self, priority: int) -> RouterClass:
        """Return the class as our routers know it."""
        ttft, slope, itl = (_milliseconds(seconds) for seconds in (self.ttft, 1000 * self.ttft_per_token, self.itl))
        return RouterClass(
            name=f"class-{priority}",
            priority=priority,
            ttft_milliseconds=ttft,
            ttft_milliseconds_per_thousand_tokens=slope if ttft else None,
            itl_milliseconds=itl,
        )


DEFAULT_CLASSES = (ServiceClass("all"),)
"""Twice the time that a new prompt takes on an idle pod is 0.25 s per 1,000 tokens. This is four times, and 2 s."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One request's class, as its place in the list of classes, and its bounds in seconds. Classes are in the order of priority."""

    service_class: int = 0
    ttft: float = math.inf
    itl: float = math.inf


def _milliseconds(seconds: float) -> int | None:
    return None if math.isinf(seconds) or not seconds else min(3_600_000, max(1, round(1000 * seconds)))


def parse_class(text: str) -> ServiceClass:
    """Parse `NAME:SHARE:A:B:C`: seconds of TTFT, seconds of TTFT per 1,000 uncached tokens, seconds of ITL. Raises UserError."""
    name, *numbers = text.split(":")
    try:
        share, ttft, per_thousand, itl = (float(number) for number in numbers)
        if not (name and 0 < share < math.inf and ttft >= 0 and per_thousand >= 0 and itl > 0):
            raise ValueError
    except ValueError:
        raise UserError(f"--class {text}: give NAME:SHARE:A:B:C, as chat:0.7:1:0.5:0.1 (inf: no bound)") from None
    return ServiceClass(name, share, ttft, per_thousand / 1000, itl)


def assign_classes(requests: Sequence[Request], classes: Sequence[ServiceClass], seed: int) -> list[Objective]:
    """Return the objective of each request. The same seed gives every policy the same ones."""
    draw = random.Random(f"classes/{seed}")
    chosen = draw.choices(range(len(classes)), [one.share for one in classes], k=len(requests))
    return [
        Objective(number, one.ttft + one.ttft_per_token * tokens, one.itl)
        for number, tokens in zip(chosen, necessary_each(requests), strict=True)
        for one in [classes[number]]
    ]
