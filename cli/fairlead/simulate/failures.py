"""When pods fail and return: named by `--fail`, or at random with a mean time between failures."""

import math
import random
from dataclasses import dataclass

from fairlead.errors import UserError


@dataclass(frozen=True, slots=True)
class Failure:
    """The pod loses its cache and its requests at `at`, and a new one is ready after `seconds`; None: the start-up time."""

    pod: int
    at: float
    seconds: float | None = None


def parse_failure(text: str) -> Failure:
    """Parse `POD@SECONDS[+SECONDS]`. Raises UserError."""
    try:
        pod, _, times = text.partition("@")
        at, _, seconds = times.partition("+")
        failure = Failure(int(pod), float(at), float(seconds) if seconds else None)
        if failure.pod < 0 or not all(0 <= each < math.inf for each in (failure.at, failure.seconds or 0.0)):
            raise ValueError
    except ValueError:
        raise UserError(f"--fail {text}: give POD@SECONDS or POD@SECONDS+SECONDS, as 3@120+60; pods count from 0") from None
    return failure


def draw_failures(pods: int, seconds: float, mean_seconds: float, seed: int) -> list[Failure]:
    """Return failures of each pod as a Poisson process with this mean time between them."""
    draw, failures = random.Random(f"failures/{seed}"), list[Failure]()
    for pod in range(pods):
        at = draw.expovariate(1 / mean_seconds)
        while at < seconds:
            failures.append(Failure(pod, at))
            at += draw.expovariate(1 / mean_seconds)
    return sorted(failures, key=lambda failure: failure.at)
