"""One cause of failure: how it is produced, and what the product must say about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .case import Case

NOT_READY, DEGRADED, INDEX = "FairleadServiceNotReady", "FairleadServiceDegraded", "FairleadIndexUnavailable"


@dataclass(frozen=True)
class Row:
    """`next_step`: words that `kubectl fairlead explain` says under "what to do next". `cause` and these words are the docs' page."""

    cause: str
    reason: str
    next_step: str
    produce: Callable[[Case], None] = lambda case: None
    spec: Mapping[str, Any] = field(default_factory=dict)
    condition: str = "Ready"  # that has the reason
    status: str = "False"
    event: str = "Warning"  # its type; its reason is `reason`
    alerts: tuple[str, ...] = (NOT_READY, DEGRADED)
    prepare: Callable[[Case], None] = lambda case: None  # before the service is created
    without_controllers: bool = False  # produced last, after kube-controller-manager has stopped

    @property
    def expected(self) -> dict[str, tuple[str, str]]:
        """Return the conditions, by type: status and reason. A fault is also in Degraded."""
        degraded = ("True", self.reason) if DEGRADED in self.alerts else ("False", "AsExpected")
        return {"Degraded": degraded, self.condition: (self.status, self.reason)}
