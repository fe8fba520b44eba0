"""Detects a writer that keeps setting the replicas of a child, such as an autoscaler that targets a Deployment instead of its service.

The operator puts the replicas back within a moment, which removes that manager from the object's `managedFields`. So the overwrites are
remembered here. A restarted operator sees them again within a few syncs of the autoscaler (15 s each).
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
"""Seconds. So many overwrites in this window are more than one person's single edit. A conflict ends after a window without any."""


class FieldConflictTracker:
    """Records the overwrites of one service's children."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._times: dict[tuple[Key, str], deque[float]] = {}
        self._components: dict[Key, str] = {}

    def record(self, key: Key, desired: Mapping[str, Any], live: Mapping[str, Any]) -> None:
        """Record an overwrite: `live` differs from what was applied last, and `desired`, unchanged, is about to be applied again."""
        wanted = (desired.get("spec") or {}).get("replicas")
        if wanted is None or live["spec"].get("replicas") == wanted or not (manager := replicas_set_by(live["metadata"])):
            return
        self._components[key] = component_of(desired)
        self._times.setdefault((key, manager), deque(maxlen=MIN_OVERWRITES)).append(self._clock())

    def current(self) -> tuple[FieldConflict, ...]:
        """Return the current conflicts."""
        now = self._clock()
        self._times = {writer: times for writer, times in self._times.items() if now - times[-1] < WINDOW}
        return tuple(
            FieldConflict(key[0], key[1], self._components[key], manager, times[-1] + WINDOW)
            for (key, manager), times in self._times.items()
            if len(times) == MIN_OVERWRITES and times[-1] - times[0] < WINDOW
        )
