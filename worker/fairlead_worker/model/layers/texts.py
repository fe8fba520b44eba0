"""Texts of a step, packed one after the other, and pooling of their hidden states."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch

TextPooling = Literal["cls", "last", "mean"]


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Texts in one row of tokens. Texts of equal length that follow each other form a run, which attention computes at once."""

    tokens: torch.Tensor
    """[tokens] int64."""
    positions: torch.Tensor
    """[tokens] int64, from 0 in each text."""
    types: torch.Tensor
    """[tokens] int64: 1 in the second text of a pair, else 0."""
    runs: tuple[tuple[int, int], ...]
    """(texts, length of each)."""

    @classmethod
    def pack(cls, texts: Sequence["array[int]"], seconds: Sequence[int], device: torch.device) -> "PackedTexts":
        """Pack token ids; sort them by length for long runs. `seconds`: where the second text of a pair begins, 0 for a single text."""
        joined = array("I")
        for text in texts:
            joined += text
        tokens = torch.frombuffer(joined, dtype=torch.int32).to(device, torch.int64)  # ids are below 2^31
        lengths = torch.tensor([len(text) for text in texts])
        begins = torch.tensor([second or len(text) for text, second in zip(texts, seconds, strict=True)])
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(len(joined)) - starts.repeat_interleave(lengths)
        types = (positions >= begins.repeat_interleave(lengths)).long()
        runs = tuple((sum(1 for _ in group), length) for length, group in groupby(map(len, texts)))
        return cls(tokens, positions.to(device), types.to(device), runs)

    def split(self, *rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the part of each run, [texts, length, ...], of tensors [tokens, ...]. Parts are views."""
        begin = 0
        for texts, length in self.runs:
            end = begin + texts * length
            yield tuple(row[begin:end].view(texts, length, *row.shape[1:]) for row in rows)
            begin = end

    def pool(self, states: torch.Tensor, kind: TextPooling) -> torch.Tensor:
        """Return [texts, width] float32 from hidden states [tokens, width]."""
        parts = (part for (part,) in self.split(states))
        if kind == "mean":
            return torch.cat([part.float().mean(1) for part in parts])
        return torch.cat([part[:, 0 if kind == "cls" else -1] for part in parts]).float()
