"""What routers have promised to workers and no load shows yet: the index's last word, and what happened after it. No I/O."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

Position = tuple[int, int]
"""A place in the stream of claims."""
NOWHERE: Final = (0, 0)


@dataclass(slots=True, eq=False)
class Change:
    """Tokens promised (above zero) or taken back. `position` is None until the index has it."""

    slot: bytes
    tokens: float
    position: Position | None = None


class Ledger:
    """Reserved tokens by slot. A change counts until the index's word is known to include it."""

    def __init__(self) -> None:
        self._owed: dict[bytes, float] = {}
        self._changes: list[Change] = []

    def owed(self, slot: bytes) -> float:
        return max(0.0, self._owed.get(slot, 0.0))

    def note(self, slot: bytes, tokens: float, position: Position | None = None) -> Change:
        change = Change(slot, tokens, position)
        self._changes.append(change)
        self._owed[slot] = self._owed.get(slot, 0.0) + tokens
        return change

    def settle(self, owed: dict[bytes, float], position: Position) -> None:
        """The index says what is owed; it knew of every change up to `position`."""
        self._changes = [change for change in self._changes if change.position is None or change.position > position]
        total: defaultdict[bytes, float] = defaultdict(float, owed)
        for change in self._changes:
            total[change.slot] += change.tokens
        self._owed = dict(total)
