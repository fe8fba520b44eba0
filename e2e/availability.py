"""The lowest number of ready workers that was seen during an action."""

import subprocess
import threading
from types import TracebackType

from e2e.service import Service


class Availability:
    """Looks at the workers' ready endpoints, as clients' traffic would find them, five times a second while the `with` block runs."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.fewest: int | None = None
        """None: it was never seen."""

    def __enter__(self) -> "Availability":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(30)

    def _look(self) -> None:
        while not self._over.wait(0.2):
            try:
                ready = sum(map(_ready, self._service.pods()))
            except (RuntimeError, subprocess.SubprocessError):  # the API server was busy: nothing was seen
                continue
            self.fewest = ready if self.fewest is None else min(self.fewest, ready)


def _ready(pod: dict[str, object]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])  # type: ignore[attr-defined]
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
