"""What a fake GPU records: kernels with their bytes and operations, and every time that the host would wait."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel or copy on the device."""

    name: str
    bytes: int
    """Read and written in the device's memory."""
    flops: int
    dtype: str
    """Of the operands of a product; empty for other kernels."""
    host_bytes: int = 0
    """Copied between the host and the device."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The host waits for the device."""

    what: str
    site: str
    """The function that caused it, as `folder/file.py:function`."""
    launches: int
    """Launches before it."""


@dataclass
class Record:
    """Everything since the last `clear`."""

    kernels: list[Kernel] = field(default_factory=list)
    launches: int = 0
    """Calls of the driver: one for each kernel or copy, one for a whole graph."""
    waits: list[Wait] = field(default_factory=list)

    def clear(self) -> None:
        self.kernels.clear()
        self.waits.clear()
        self.launches = 0

    def totals(self) -> dict[str, int]:
        """Return launches, kernels, bytes, flops and waits."""
        return {
            "launches": self.launches,
            "kernels": len(self.kernels),
            "bytes": sum(kernel.bytes for kernel in self.kernels),
            "flops": sum(kernel.flops for kernel in self.kernels),
            "waits": len(self.waits),
        }

    def by_name(self) -> Counter[str]:
        """Return how many kernels there are of each name."""
        return count_names(self.kernels)


def count_names(kernels: Iterable[Kernel]) -> Counter[str]:
    return Counter(kernel.name for kernel in kernels)
