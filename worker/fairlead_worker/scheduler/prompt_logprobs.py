"""Logprobs of one prompt's tokens, collected chunk by chunk and sent with the first output token."""

from collections.abc import Sequence

from fairlead_worker.ipc.messages import TokenLogprobs


class PromptLogprobs:
    """Counts each prompt position once, even if it is computed again after a preemption."""

    __slots__ = ("_prompt_length", "_unsent", "scored")

    def __init__(self, prompt_length: int) -> None:
        self.scored = 0
        """Leading prompt positions that already have a logprob for the token after them."""
        self._prompt_length = prompt_length
        self._unsent: list[TokenLogprobs] = []

    @property
    def is_complete(self) -> bool:
        return self.scored >= self._prompt_length - 1

    def positions(self, start: int, end: int) -> range:
        """Return the positions in `start` to `end` that need logits."""
        return range(0) if self.is_complete else range(max(start, self.scored), min(end, self._prompt_length - 1))

    def add(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Store the logprobs of the next positions."""
        self._unsent += logprobs
        self.scored += len(logprobs)

    def take(self) -> tuple[TokenLogprobs, ...]:
        """Return the stored logprobs once."""
        logprobs, self._unsent = self._unsent, []
        return tuple(logprobs)
