"""Tokens that routers have reserved and that no load report shows yet: the index's last total, and the changes after it. No I/O."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

Position = tuple[int, int]
"""A position in the stream `r:changes`."""
START: Final = (0, 0)


@dataclass(slots=True, eq=False)
class ReservationChange:
    """Tokens reserved (above zero) or released. `position` is None until the index has the change."""

    slot: bytes
    tokens: float
    position: Position | None = None


class ReservedTokens:
    """Reserved tokens by slot. A change counts until the index's total is known to include it."""

    def __init__(self) -> None:
        self._tokens: dict[bytes, float] = {}
        self._changes: list[ReservationChange] = []

    def get(self, slot: bytes) -> float:
        """Return the reserved tokens of a slot."""
        return max(0.0, self._tokens.get(slot, 0.0))

    def record(self, slot: bytes, tokens: float, position: Position | None = None) -> ReservationChange:
        """Count a change from now on."""
        change = ReservationChange(slot, tokens, position)
        self._changes.append(change)
        self._tokens[slot] = self._tokens.get(slot, 0.0) + tokens
        return change

    def reconcile(self, reserved: dict[bytes, float], position: Position) -> None:
        """Replace the totals with the index's, which include every change up to `position`."""
        self._changes = [change for change in self._changes if change.position is None or change.position > position]
        total: defaultdict[bytes, float] = defaultdict(float, reserved)
        for change in self._changes:
            total[change.slot] += change.tokens
        self._tokens = dict(total)
