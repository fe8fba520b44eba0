"""Somebody else sets the replicas of a child, again and again: an autoscaler that is pointed at a Deployment instead of its service.

Each time they are put back within a moment, which takes that manager out of the object's `managedFields`. So what was seen is remembered
here, for as long as it matters; an operator that is restarted has seen it anew within a few of the autoscaler's syncs (15 s).
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from fairlead_operator.kube.cache import Key
from fairlead_operator.kube.difference import replicas_set_by
from fairlead_operator.objects import component_of
from fairlead_operator.observed import FieldConflict

MIN_OVERWRITES = 3
WINDOW = 600.0
"""Seconds: so often in such a time is no one person's single edit. It is over when nobody has done it for as long."""


class FieldConflictTracker:
    """Of one service's children."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._times: dict[tuple[Key, str], deque[float]] = {}
        self._components: dict[Key, str] = {}

    def record(self, key: Key, desired: Mapping[str, Any], live: Mapping[str, Any]) -> None:
        """`live` is not as we left it, and about to be `desired` again, as it was before."""
        wanted = (desired.get("spec") or {}).get("replicas")
        if wanted is None or live["spec"].get("replicas") == wanted or not (manager := replicas_set_by(live["metadata"])):
            return
        self._components[key] = component_of(desired)
        self._times.setdefault((key, manager), deque(maxlen=MIN_OVERWRITES)).append(self._clock())

    def current(self) -> tuple[FieldConflict, ...]:
        """Those that go on."""
        now = self._clock()
        self._times = {who: times for who, times in self._times.items() if now - times[-1] < WINDOW}
        return tuple(
            FieldConflict(key[0], key[1], self._components[key], manager, times[-1] + WINDOW)
            for (key, manager), times in self._times.items()
            if len(times) == MIN_OVERWRITES and times[-1] - times[0] < WINDOW
        )
