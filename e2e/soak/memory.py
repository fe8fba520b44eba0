"""Resident memory of the system's processes over time, and its slope."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import linear_regression
from types import TracebackType

from e2e import progress
from e2e.service import Service

PERIOD = 5.0  # seconds
WARM_UP = 60.0  # seconds of a process that are left out: it loads modules and fills its caches
SHORTEST = 60.0  # seconds of samples that a slope needs
Sample = tuple[float, float]
"""Seconds, and MB."""
_READ = "cat /proc/[0-9]*/status"


@dataclass
class MemoryLog:
    """Samples of each process of a component while the `with` block runs: component → container's id → samples."""

    service: Service
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)

    def __enter__(self) -> "MemoryLog":
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(60)

    def _follow(self) -> None:
        system = self.service.system
        places = {"operator": system.namespace, "router": system.models, "redis": system.namespace}
        while not self._ended.wait(PERIOD):
            for component, namespace in places.items():
                try:
                    pods = system.get("pods", "-l", f"app.kubernetes.io/component={component}", namespace=namespace)["items"]
                    for pod in pods:
                        self._sample(component, namespace, pod)
                except Exception as error:  # a fault: there is no sample now, and later ones still count
                    progress.say(f"no memory sample of {component}: {type(error).__name__}: {str(error)[:200]}")

    def _sample(self, component: str, namespace: str, pod: dict[str, object]) -> None:
        containers = pod["status"].get("containerStatuses", [])  # type: ignore[attr-defined]
        if not containers or "running" not in containers[0]["state"]:
            return
        name = str(pod["metadata"]["name"])  # type: ignore[index]
        page = self.service.system.cluster.kubectl("exec", "-n", namespace, name, "--", "sh", "-c", _READ, check=False).stdout
        kilobytes = [int(line.split()[1]) for line in page.splitlines() if line.startswith("VmRSS:")]
        if kilobytes:
            samples = self.samples.setdefault(component, {}).setdefault(containers[0]["containerID"], [])
            samples.append((time.monotonic(), sum(kilobytes) / 1024))


def slope(samples: Sequence[Sample]) -> float | None:
    """Return the growth in MB per hour after the warm-up; None: there are too few samples."""
    after = [(at, size) for at, size in samples if at >= samples[0][0] + WARM_UP]
    if len(after) < 3 or after[-1][0] - after[0][0] < SHORTEST:
        return None
    times, sizes = zip(*after, strict=True)
    return linear_regression(times, sizes).slope * 3600
