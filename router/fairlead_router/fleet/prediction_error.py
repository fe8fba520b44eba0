"""Recent prediction error of one worker's cached tokens."""

from typing import Any

WEIGHT = 1 / 16


class PredictionError:
    """Moving averages of the error, as a share of the prompt. `over`: the index predicted too much; `under`: too little."""

    def __init__(self) -> None:
        self.recalls = 0
        self._generation = 0
        self.reset()

    def reset(self) -> None:
        self.answers = 0
        self.over = self.under = 0.0

    def record(self, generation: int, over: float, under: float) -> None:
        """Record one answer of this generation of the worker."""
        if generation != self._generation:
            self._generation = generation
            self.reset()
        self.answers += 1
        weight = max(WEIGHT, 1 / self.answers)  # a plain mean at first
        self.over += weight * (over - self.over)
        self.under += weight * (under - self.under)

    @property
    def worst(self) -> float:
        return max(self.over, self.under)

    def to_dict(self) -> dict[str, Any]:
        return {"answers": self.answers, "over": round(self.over, 4), "under": round(self.under, 4), "recalls": self.recalls}
