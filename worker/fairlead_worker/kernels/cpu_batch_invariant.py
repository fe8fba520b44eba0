"""Batch-invariant attention in torch: a query's bits depend on its own KV and position alone. For `--deterministic` without the native
library.

A matrix library chooses its order of summation by the shapes of a product, so the shapes here follow from positions. Queries go in
blocks that begin at multiples of BLOCK, over every key up to the end of the block. Places of a block that the step does not compute hold
zeros.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fairlead_worker.kernels.base import CausalMask, KVSpec, LayerSpec, PackedStep
from fairlead_worker.kernels.reference import softmax_with_sinks

BLOCK = 8
"""Queries of a block. A decode computes a whole block too: its attention costs more and reads the same memory."""


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries of one row whose positions lie in one block. L keys."""

    tokens: slice
    """Their indices in the packed step."""
    places: slice
    """Their indices in the block."""
    pages: torch.Tensor
    """[L / page_size] int32. Pages that the row does not have yet repeat its last page, and those behind the window of its first query,
    which it may not have any more, the first page within. The bias hides their keys."""
    bias: torch.Tensor
    """[BLOCK, L] in the KV's dtype: 0 where the query sees the key, else -inf."""


def plan_blocks(step: PackedStep, spec: KVSpec, mask: CausalMask) -> Iterator[QueryBlock]:
    """Yield the blocks of every row of `step`, for layers of this mask."""
    token = 0
    for start, count, table in zip(step.starts, step.counts, step.tables(), strict=True):
        for block in range(start // BLOCK * BLOCK, start + count, BLOCK):
            begin, end = max(start, block), min(start + count, block + BLOCK)
            first, kept = (mask.first_key(at) // spec.page_size for at in (block, start))
            wanted = torch.arange(first, -(-(block + BLOCK) // spec.page_size)).clamp_(kept, len(table) - 1)
            keys = torch.arange(len(wanted) * spec.page_size) + first * spec.page_size
            queries = torch.arange(block, block + BLOCK)[:, None]
            hidden = mask.hides(queries, keys)
            bias = torch.zeros(hidden.shape, dtype=spec.dtype).masked_fill_(hidden, float("-inf"))
            tokens = slice(token + begin - start, token + end - start)
            yield QueryBlock(tokens, slice(begin - block, end - block), table[wanted], bias)
        token += count


def attend_block(spec: LayerSpec, block: QueryBlock, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the attention of the block's queries: query [T, heads, key_dim] of the whole step -> [tokens, heads, value_dim].

    keys, values: the storage of `CpuBackend`, [kv_heads, pages, page_size * dim], with the step's own KV in it.
    """
    size, length, kv_heads = *block.bias.shape, spec.kv_heads
    queries = query.new_zeros(size, spec.heads, spec.key_dim)
    queries[block.places] = query[block.tokens] * spec.scaling
    queries = queries.view(size, kv_heads, -1, spec.key_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, spec.key_dim)
    key = keys.index_select(1, block.pages).view(kv_heads, length, spec.key_dim)
    scores = torch.bmm(queries, key.transpose(1, 2))
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores = scores.view(kv_heads, -1, size, length).add_(block.bias)
    weights = softmax_with_sinks(scores, spec.sinks, kv_heads, -1, 1, 1).view(kv_heads, -1, length)
    value = values.index_select(1, block.pages).view(kv_heads, length, spec.value_dim)
    mixed = torch.bmm(weights, value).view(kv_heads, -1, size, spec.value_dim).permute(2, 0, 1, 3)
    return mixed.reshape(size, spec.heads, spec.value_dim)[block.places]
