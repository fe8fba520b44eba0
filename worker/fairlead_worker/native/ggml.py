"""Linear layers of weights in ggml's block types, as in a GGUF file (`src/blocks.h`). The numbers stay exactly the file's.

Activations are rounded to 8 bits in groups of 32, as llama.cpp does.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch

from fairlead_worker.native.library import pointer
from fairlead_worker.native.linear import KINDS, PANEL, NativeLinear, fill_panels, library, panel_table
from fairlead_worker.native.memory import Arena, room

KIND_OF = {"Q4_0": 3, "Q4_1": 4, "Q5_0": 5, "Q5_1": 6, "Q8_0": 7, "Q4_K": 8, "Q5_K": 9, "Q6_K": 10}
"""As `Kind` in native.h."""
BLOCK_TYPES = frozenset(KIND_OF)
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Parts = Sequence[tuple[torch.Tensor, str]]
"""Rows [outputs, bytes of a row] uint8 as in a GGUF file, and their type."""


class GgmlLinear(NativeLinear):
    """A linear layer of parts that are stacked along its outputs, each of its own ggml type."""

    def __init__(
        self, parts: Parts, in_features: int, bias: torch.Tensor | None, *, dtype: torch.dtype, arena: Arena | None = None
    ) -> None:
        """parts: of BLOCK_TYPES, F32, F16 or BF16; the last three are converted to `dtype`, that of the activations: float32 or bfloat16.
        bias [out_features]. arena: with room for each part's `packed_ggml_bytes`. Raises KeyError for another type or dtype.

        A panel across two types is float32.
        """
        torch.nn.Module.__init__(self)
        for blocks, ggml_type in parts:
            _check(blocks, ggml_type, in_features)
        if arena is None:
            arena = Arena(sum(room(packed_ggml_bytes(len(blocks), in_features, ggml_type)) for blocks, ggml_type in parts))
        memory, panels = [], []
        for kind, begin, end in (runs := _runs(parts, dtype)):
            pieces = list(_between(parts, begin, end))
            pure = len({ggml_type for _, ggml_type in pieces}) == 1
            size = library().fairlead_packed_bytes(kind, end - begin, in_features)
            # Few panels are of two types: with memory of their own the arena's size stays simple.
            packed = arena.take(size) if pure else torch.zeros(size, dtype=torch.uint8)
            if pure and pieces[0][1] in BLOCK_TYPES:
                _pack_blocks(pieces, kind, in_features, packed)
            else:
                wide = torch.cat([dequantize_rows(blocks, ggml_type, in_features) for blocks, ggml_type in pieces])
                fill_panels(packed, kind, wide if kind == KINDS[torch.float32] else wide.bfloat16())
            memory.append(packed)
            panels.append(panel_table(packed, kind, end - begin))
        names = ", ".join(dict.fromkeys(ggml_type for _, ggml_type in parts))
        self._describe((runs[-1][2], in_features), dtype, names, memory, torch.cat(panels), None, bias)


def _runs(parts: Parts, dtype: torch.dtype) -> list[tuple[int, int, int]]:
    """Return runs of whole panels of one kind: the kind, and the outputs from begin to end."""
    outputs = sum(len(blocks) for blocks, _ in parts)
    panels = []
    for begin in range(0, outputs, PANEL):
        types = {ggml_type for _, ggml_type in _between(parts, begin, begin + PANEL)}
        kind = KINDS[torch.float32] if len(types) > 1 else KIND_OF.get(next(iter(types)), KINDS[dtype])
        panels.append((len(types) > 1, kind, begin))
    runs = [list(run) for _, run in itertools.groupby(panels, key=lambda panel: panel[:2])]
    return [(run[0][1], run[0][2], min(run[-1][2] + PANEL, outputs)) for run in runs]


def _between(parts: Parts, begin: int, end: int) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield the rows of each part that are outputs from `begin` to `end`."""
    at = 0
    for blocks, ggml_type in parts:
        low, high = max(begin - at, 0), min(end - at, len(blocks))
        if low < high:
            yield blocks[low:high], ggml_type
        at += len(blocks)


def _pack_blocks(pieces: Parts, kind: int, in_features: int, packed: torch.Tensor) -> None:
    """Fill panels, of zeros, with pieces of one block type."""
    size, at = library().fairlead_packed_bytes(kind, PANEL, in_features), 0
    for blocks, _ in pieces:
        panels = packed[at // PANEL * size :]
        library().fairlead_pack_blocks(
            torch.get_num_threads(), kind, pointer(blocks), len(blocks), in_features, at % PANEL, pointer(panels)
        )  # fmt: skip
        at += len(blocks)


def _check(blocks: torch.Tensor, ggml_type: str, in_features: int) -> None:
    """Raise ValueError unless a row has as many bytes as `in_features` take: the library reads without bounds checks."""
    size = PLAIN[ggml_type].itemsize * in_features if ggml_type in PLAIN else library().fairlead_row_bytes(KIND_OF[ggml_type], in_features)
    if blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[1] != size or not blocks.is_contiguous():
        wanted = f"{size} contiguous bytes" if size >= 0 else "whole blocks"
        raise ValueError(f"{list(blocks.shape)} {blocks.dtype} are no rows of {in_features} inputs in {ggml_type}: they take {wanted}")


def packed_ggml_bytes(out_features: int, in_features: int, ggml_type: str) -> int:
    """Return the bytes of a part of a `GgmlLinear` when packed: at most, for the types that are no blocks."""
    size: int = library().fairlead_packed_bytes(KIND_OF.get(ggml_type, KINDS[torch.float32]), out_features, in_features)
    return size


def dequantize_rows(blocks: torch.Tensor, ggml_type: str, in_features: int) -> torch.Tensor:
    """Return rows [n, bytes of a row] uint8 of BLOCK_TYPES, F32, F16 or BF16 as [n, in_features] float32. Raises KeyError for others."""
    _check(blocks, ggml_type, in_features)
    if ggml_type in PLAIN:
        return blocks.view(PLAIN[ggml_type]).float()
    rows = torch.empty(len(blocks), in_features)
    library().fairlead_widen_blocks(
        torch.get_num_threads(), KIND_OF[ggml_type], pointer(blocks), len(blocks), in_features, pointer(rows)
    )  # fmt: skip
    return rows
