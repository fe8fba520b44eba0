"""How much longer first tokens take at a worker than its reported prefill rate lets expect, for example beside decodes."""

_WEIGHT = 1 / 32
"""Weight of the newest answer: the pace follows within about 32 answers."""
SLOWEST = 4.0
SHORTEST_SECONDS = 0.1
"""Shorter expectations are not recorded: fixed costs, such as the first decode step, outweigh the prefill there."""


class PrefillPace:
    """Ratio of two decaying sums: actual and expected seconds to the first token. So long waits count more than short ones.

    It is at least 1: an order other than by arrival makes the mean of the waits shorter, and the longest of them longer.
    """

    def __init__(self) -> None:
        self._actual = self._expected = 0.0
        self._answers = 0
        self.value = 1.0

    def record(self, expected: float, actual: float) -> None:
        """Record the first token of a stream: `expected` when it was sent, by the reported rate, and `actual` seconds."""
        if expected < SHORTEST_SECONDS:
            return
        self._answers += 1
        weight = max(_WEIGHT, 1 / self._answers)  # a plain mean at first
        self._actual += weight * (actual - self._actual)
        self._expected += weight * (expected - self._expected)
        self.value = min(SLOWEST, max(1.0, self._actual / self._expected))
