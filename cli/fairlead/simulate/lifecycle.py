"""Pods that start, drain and end: which numbers are taken, since when, and the pod-seconds that they cost."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Lifecycle:
    """A number is free, or its pod starts, serves or drains. `created_at`: of all pods that exist."""

    most: int
    created_at: dict[int, float] = field(default_factory=dict)
    starting: set[int] = field(default_factory=set)
    draining: set[int] = field(default_factory=set)
    pod_seconds: float = 0.0
    """Of the pods that have ended."""
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """The number of pods from each moment on."""

    @property
    def desired(self) -> int:
        """Pods that start or serve: the size of the Deployment."""
        return len(self.created_at) - len(self.draining)

    def create(self, now: float) -> int | None:
        """Return the number of a new pod, which starts; None: all numbers are taken."""
        pod = next((number for number in range(self.most) if number not in self.created_at), None)
        if pod is not None:
            self.created_at[pod] = now
            self.starting.add(pod)
            self._note(now)
        return pod

    def remove(self, pod: int, now: float) -> None:
        self.pod_seconds += now - self.created_at.pop(pod)
        self.starting.discard(pod)
        self.draining.discard(pod)
        self._note(now)

    def _note(self, now: float) -> None:
        self.sizes.append((now, len(self.created_at)))
