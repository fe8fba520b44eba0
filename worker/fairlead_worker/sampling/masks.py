"""Bit masks over the vocabulary, applied to several rows of logits together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fairlead_worker.kernels.transfer import to_device, to_host


@dataclass(slots=True)
class Masks:
    """Allowed tokens at some of the sampling positions of a step."""

    places: list[int]
    """Positions, in the order of the logits' rows."""
    words: np.ndarray
    """[places, words] uint32: bit i of a row is token i."""
    _empty: Callable[[], torch.Tensor] | None = field(default=None, init=False)
    """[places] bool: positions at which no token is left. None: not applied yet."""

    @property
    def dead(self) -> set[int]:
        """Return the positions at which no token is left, once applied. Waits for the device."""
        if self._empty is None:
            return set()
        return {place for place, none in zip(self.places, self._empty().tolist(), strict=True) if none}

    def tell(self, empty: Callable[[], torch.Tensor]) -> None:
        """Take from elsewhere, [places] bool, at which positions no token is left."""
        self._empty = empty

    def apply(self, logits: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Return logits [rows, vocabulary] float32, of `positions`, with forbidden tokens at -inf. Masks go to the device packed."""
        if not self.places:
            return logits
        row_of = {position: row for row, position in enumerate(positions)}
        rows = [row_of[place] for place in self.places]
        return self._on_host(logits, rows) if logits.device.type == "cpu" else self._on_device(logits, rows)

    def _on_host(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Apply with numpy, without torch's threads: waking them for each small operation took three quarters of the time."""
        values, forbidden = logits.numpy(), np.float32("-inf")
        allowed = np.unpackbits(self.words.view(np.uint8), axis=1, bitorder="little", count=values.shape[1]).view(np.bool_)
        every = rows == list(range(len(values)))
        kept = np.where(allowed, values if every else values[rows], forbidden)
        empty = kept.max(1) == forbidden
        if empty.any():
            kept[empty] = 0.0  # a token is drawn there and dropped
        nothing_left = torch.from_numpy(empty)
        self._empty = lambda: nothing_left
        if every:
            return torch.from_numpy(kept)
        masked = values.copy()
        masked[rows] = kept
        return torch.from_numpy(masked)

    def _on_device(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        index = to_device(rows, logits.device)
        kept = logits[index].masked_fill_(~unpack(self.words, logits.shape[1], logits.device), float("-inf"))
        empty = kept.amax(1) == float("-inf")
        self._empty = to_host(empty)
        return logits.index_copy(0, index, kept.masked_fill_(empty[:, None], 0.0))


def unpack(words: np.ndarray, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Unpack words [rows, n] uint32 -> [rows, vocabulary] bool. Tokens after the last word are forbidden."""
    packed = to_device(torch.from_numpy(words.view(np.uint8)), device)  # little-endian: bytes in token order
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    allowed = bits.view(len(words), -1).bool()
    if allowed.shape[1] < vocabulary:
        return torch.nn.functional.pad(allowed, (0, vocabulary - allowed.shape[1]))
    return allowed[:, :vocabulary]
