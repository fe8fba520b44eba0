"""Bit masks over the vocabulary, applied to rows of logits at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(slots=True)
class Masks:
    """Which tokens may come at some of the sampling positions of a step."""

    places: list[int]
    """Positions, in the order of the logits' rows."""
    words: np.ndarray
    """[places, words] uint32: bit i of a row is token i."""
    dead: set[int] = field(default_factory=set)
    """Positions at which nothing is left to choose, once applied."""

    def apply(self, logits: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """logits [rows, vocabulary], of `positions` -> the same with what a mask forbids at -inf. Packed masks go to the device."""
        if not self.places:
            return logits
        row_of = {position: row for row, position in enumerate(positions)}
        rows = torch.tensor([row_of[place] for place in self.places], device=logits.device)
        kept = logits[rows].masked_fill_(~unpack(self.words, logits.shape[1], logits.device), float("-inf"))
        empty = kept.amax(1) == float("-inf")
        if bool(empty.any()):
            kept[empty] = 0.0  # something is drawn there, and dropped
            self.dead.update(place for place, none in zip(self.places, empty.tolist(), strict=True) if none)
        return logits.index_copy(0, rows, kept)


def unpack(words: np.ndarray, vocabulary: int, device: torch.device) -> torch.Tensor:
    """words [rows, n] uint32 -> [rows, vocabulary] bool. Tokens behind the last word are forbidden."""
    packed = torch.from_numpy(words.view(np.uint8)).to(device)  # little-endian: bytes in the order of the tokens
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    allowed = bits.view(len(words), -1).bool()
    if allowed.shape[1] < vocabulary:
        return torch.nn.functional.pad(allowed, (0, vocabulary - allowed.shape[1]))
    return allowed[:, :vocabulary]
