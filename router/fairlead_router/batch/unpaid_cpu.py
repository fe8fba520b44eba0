"""CPU time that the batch server spends on a tenant without knowing it beforehand. The tenant's next answer reports it to the router."""

from typing import Final

HEADER: Final = "x-fairlead-cpu-ms"
"""Whole milliseconds; absent for less than one."""


class UnpaidCpu:
    """Seconds of validations and lists that no answer has reported, by tenant."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def add(self, tenant: str, seconds: float) -> None:
        self._seconds[tenant] = self._seconds.get(tenant, 0.0) + seconds

    def take(self, tenant: str) -> dict[str, str]:
        """Return the header for an answer. What is less than a millisecond is kept."""
        milliseconds = int(1000 * self._seconds.get(tenant, 0.0))
        if not milliseconds:
            return {}
        self._seconds[tenant] -= milliseconds / 1000
        return {HEADER: str(min(milliseconds, 999_999))}
