"""The lowest number of ready workers during an action."""

import subprocess
import threading
from types import TracebackType

from e2e.service import Service


class Availability:
    """Counts the ready worker pods five times a second while the `with` block runs."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self.fewest: int | None = None
        """None: no count succeeded."""

    def __enter__(self) -> "Availability":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(30)

    def _count(self) -> None:
        while not self._ended.wait(0.2):
            try:
                ready = sum(map(_is_ready, self._service.pods()))
            except (RuntimeError, subprocess.SubprocessError):  # the API server is busy: there is no count
                continue
            self.fewest = ready if self.fewest is None else min(self.fewest, ready)


def _is_ready(pod: dict[str, object]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])  # type: ignore[attr-defined]
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
