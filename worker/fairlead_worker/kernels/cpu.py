"""Backend for CPUs: as exact as `reference`, several times faster in decoding, and without a compiler.

Measured on one core of an AMD EPYC with AVX512-BF16 (bf16, 8 rows of 320 keys, 12 heads on 4 of 64, one layer): torch's own attention
needs 0.5 ms, because it splits so little work badly. Two batched products and a softmax need 0.13 ms, plus 0.06 ms for the gather.
Reading the KV from memory once takes 0.12 ms, so a compiled kernel over pages in place could save 0.07 ms of a layer's 0.8 ms in a step.
So the page layout makes the gather of a row's pages also the transposition that the products need.

Prefill chunks in float32 use torch's flash attention. In bfloat16 that is slow too (256 queries over 256 keys: 3.1 ms a layer), and
products over blocks of 64 queries are two to three times faster (1.1 ms). A chunk that begins its request reads no pages.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from fairlead_worker.kernels.base import CausalMask, KVSpec, LayerSpec, PackedStep, StepContext, make_zeros, pad_page_count
from fairlead_worker.kernels.cpu_batch_invariant import QueryBlock, attend_block, plan_blocks
from fairlead_worker.kernels.groups import GroupedStep
from fairlead_worker.kernels.reference import softmax_with_sinks

GROUP_TOKENS = 65_536
"""Most KV tokens gathered together for a group of decode rows. Bounds scratch memory to a third of a GiB at 8 heads of 128 in float32."""
BLOCK = 64
"""Queries of a chunk whose scores are computed together: the fastest of 32 to 512, with scores that stay in the cache."""
BLOCK_SCORES = 1 << 22
"""Most scores held together; very long contexts get smaller blocks."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """B rows of one query each and a similar number of pages, attended to together. L = padded pages * page_size."""

    tokens: torch.Tensor | None
    """[B] int64: index of each query in the packed step; None: the queries are the whole step, in order."""
    rows: int
    pages: torch.Tensor
    """[B * padded pages] int32. Padding repeats a row's own last page, so a row never reads another request's page."""
    bias: torch.Tensor
    """[B, 1, L] in the KV's dtype: 0 where the query sees the key, else -inf."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row of Q queries over L keys. Without pages it begins its request, and its keys are this step's own."""

    begin: int
    end: int
    pages: torch.Tensor | None
    """[pages] int32."""
    offset: int
    """Index of the key that belongs to the first query."""
    bias: torch.Tensor
    """[Q, L], 0 where the query sees the key, else -inf."""


class CpuBackend:
    """Keys and values as [kv_heads, pages, page_size * dim] for each layer."""

    name = "cpu"

    def __init__(self, spec: KVSpec, pages: int) -> None:
        self.spec = spec
        self.pages = pages
        self.batch_invariant = False
        """Whether a query's bits must not depend on the batch or on how its prompt was chunked (`cpu_batch_invariant`)."""
        # Zeros, not uninitialised memory: masked slots are multiplied by zero, and zero times a stray NaN is NaN.
        keys = [self._storage(layer.kv_heads, layer.key_dim) for layer in spec.stored]
        values = [self._storage(layer.kv_heads, layer.own_value_dim) for layer in spec.stored]
        self._stored = (*keys, *values)
        values = [
            torch.unflatten(key, 2, (spec.page_size, -1))[..., : layer.value_dim] if layer.value_in_key else value
            for key, value, layer in zip(keys, values, spec.stored, strict=True)
        ]
        self.keys, self.values = ([parts[place] for place in spec.places] for parts in (keys, values))
        self._step = _grouped_step if spec.groups else CpuStep

    def _storage(self, kv_heads: int, dim: int) -> torch.Tensor:
        return make_zeros(kv_heads, self.pages, self.spec.page_size * dim, dtype=self.spec.dtype, device=self.spec.device)

    def plan(self, step: PackedStep) -> StepContext:
        return self._step(self, step)

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.index_select(1, pages).transpose(0, 1).flatten(1) for part in self._stored], 1)

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        parts = self._stored
        for part, piece in zip(parts, torch.split(content, [part[:, 0].numel() for part in parts], 1), strict=True):
            part.index_copy_(1, pages, piece.view(len(pages), part.shape[0], part.shape[2]).transpose(0, 1))


class CpuStep:
    """One step: its rows grouped for each distinct mask among the layers, on the first request of a layer."""

    def __init__(self, backend: CpuBackend, step: PackedStep) -> None:
        self._backend = backend
        self._step = step
        self._groups: dict[CausalMask, tuple[list[Decodes], list[Chunk]]] = {}
        self._blocks: dict[CausalMask, list[QueryBlock]] = {}

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        spec = self._backend.spec.layers[layer]
        keys, values = self._backend.keys[layer], self._backend.values[layer]
        if spec.source is None:
            _store(keys, self._step.slots, key)
        if spec.source is None and not spec.value_in_key:
            _store(values, self._step.slots, value)
        if self._backend.batch_invariant:
            if spec.mask not in self._blocks:
                self._blocks[spec.mask] = list(plan_blocks(self._step, self._backend.spec, spec.mask))
            return torch.cat([attend_block(spec, block, query, keys, values) for block in self._blocks[spec.mask]])
        if spec.mask not in self._groups:
            self._groups[spec.mask] = plan_groups(self._step, self._backend.spec, spec.mask)
        decodes, chunks = self._groups[spec.mask]
        if decodes and decodes[0].tokens is None:
            return _decode(spec, decodes[0], query, keys, values)
        output = query.new_empty(query.shape[0], spec.heads, spec.value_dim)
        for group in decodes:
            output[group.tokens] = _decode(spec, group, query[group.tokens], keys, values)
        for chunk in chunks:
            where = slice(chunk.begin, chunk.end)
            output[where] = _chunk(spec, chunk, query[where], key[where], value[where], keys, values)
        return output


def _grouped_step(backend: CpuBackend, step: PackedStep) -> GroupedStep:
    return GroupedStep(backend.spec.groups, [CpuStep(backend, each) for each in step.of_groups()])


def plan_groups(step: PackedStep, spec: KVSpec, mask: CausalMask) -> tuple[list[Decodes], list[Chunk]]:
    """Group decode rows with a similar number of pages; chunks stay alone.

    A row's padding depends on the row alone, so that its bits do not depend on the other rows of the step.
    """
    chunks: list[Chunk] = []
    buckets: dict[int, list[tuple[int, int, int, torch.Tensor]]] = {}
    token = 0
    for start, count, table in zip(step.starts, step.counts, step.tables(), strict=True):
        first = mask.first_key(start) // spec.page_size
        visible = table[first:] if first else table
        if count > 1:
            chunks.append(_plan_chunk(token, start, count, first, visible, mask, spec))
        else:
            buckets.setdefault(pad_page_count(len(visible)), []).append((token, start, first, visible))
        token += count
    decodes = []
    for pages, rows in buckets.items():
        size = max(1, GROUP_TOKENS // (pages * spec.page_size))
        decodes += [_decodes(rows[i : i + size], pages, token, spec, mask) for i in range(0, len(rows), size)]
    return decodes, chunks


def _decodes(rows: list[tuple[int, int, int, torch.Tensor]], pages: int, total: int, spec: KVSpec, mask: CausalMask) -> Decodes:
    tokens = [token for token, _, _, _ in rows]
    queries = torch.tensor([start for _, start, _, _ in rows])[:, None]
    offsets = torch.tensor([first for _, _, first, _ in rows])[:, None] * spec.page_size
    tables = torch.cat([part for _, _, _, table in rows for part in (table, table[-1:].expand(pages - len(table)))])
    bias = _bias(queries, offsets + torch.arange(pages * spec.page_size), mask, spec)[:, None]
    return Decodes(None if len(rows) == total else torch.tensor(tokens, device=spec.device), len(rows), tables.to(spec.device), bias)


def _plan_chunk(token: int, start: int, count: int, first: int, pages: torch.Tensor, mask: CausalMask, spec: KVSpec) -> Chunk:
    queries = torch.arange(start, start + count)[:, None]
    if start == 0:
        return Chunk(token, token + count, None, 0, _bias(queries, torch.arange(count), mask, spec))
    keys = torch.arange(first * spec.page_size, start + count)
    return Chunk(token, token + count, pages.to(spec.device), start - first * spec.page_size, _bias(queries, keys, mask, spec))


def _bias(queries: torch.Tensor, keys: torch.Tensor, mask: CausalMask, spec: KVSpec) -> torch.Tensor:
    hidden = mask.hides(queries, keys)
    return torch.zeros(hidden.shape, dtype=spec.dtype).masked_fill_(hidden, float("-inf")).to(spec.device)


def _store(storage: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Store new [T, kv_heads, dim] into slots [T]."""
    storage.view(storage.shape[0], -1, new.shape[2]).index_copy_(1, slots, new.transpose(0, 1).to(storage.dtype))


def _decode(spec: LayerSpec, group: Decodes, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend with query [B, heads, key_dim] -> [B, heads, value_dim]."""
    rows, kv_heads = group.rows, spec.kv_heads
    length = group.bias.shape[2]
    # Query heads that share a KV head become several queries of it, so keys need not be repeated.
    query = query.reshape(rows, kv_heads, -1, spec.key_dim).transpose(0, 1).reshape(kv_heads * rows, -1, spec.key_dim)
    key = keys.index_select(1, group.pages).view(kv_heads * rows, length, spec.key_dim)
    scores = torch.bmm(query * spec.scaling, key.transpose(1, 2)).view(kv_heads, rows, -1, length)
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    weights = softmax_with_sinks(scores.add_(group.bias), spec.sinks, kv_heads, 1, -1, 1).view(kv_heads * rows, -1, length)
    value = values.index_select(1, group.pages).view(kv_heads * rows, length, spec.value_dim)
    output = torch.bmm(weights, value).view(kv_heads, rows, -1, spec.value_dim)
    return output.transpose(0, 1).reshape(rows, spec.heads, spec.value_dim)


def _chunk(
    spec: LayerSpec, chunk: Chunk, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attend with query [Q, heads, key_dim] -> [Q, heads, value_dim].

    key and value [Q, kv_heads, dim] are this step's; keys and values are the storage.
    """
    if chunk.pages is None:
        key, value = key.transpose(0, 1), value.transpose(0, 1)
    else:
        length = chunk.bias.shape[1]
        key = keys.index_select(1, chunk.pages).view(spec.kv_heads, -1, spec.key_dim)[:, :length]
        value = values.index_select(1, chunk.pages).view(spec.kv_heads, -1, spec.value_dim)[:, :length]
    if spec.softcap is not None or spec.sinks is not None or query.dtype == torch.bfloat16:
        return _blocks(spec, chunk, query, key, value)
    output = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key[None],
        value[None],
        attn_mask=chunk.bias[None, None],
        scale=spec.scaling,
        enable_gqa=spec.heads != spec.kv_heads,
    )
    return output[0].transpose(0, 1)


def _blocks(spec: LayerSpec, chunk: Chunk, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Compute as `_chunk`, with key and value [kv_heads, L, dim]: a block of queries reads only the keys up to its last query."""
    count, kv_heads = query.shape[0], spec.kv_heads
    query = (query * spec.scaling).view(count, kv_heads, -1, spec.key_dim).permute(1, 2, 0, 3)
    output = query.new_empty(count, kv_heads, query.shape[1], spec.value_dim)
    block = max(1, min(BLOCK, BLOCK_SCORES // (spec.heads * key.shape[1])))
    for begin in range(0, count, block):
        end = min(begin + block, count)
        size, seen = end - begin, chunk.offset + end
        # Without a window all keys before the block are visible, and only its own corner needs the mask.
        masked = chunk.offset + begin if spec.mask.span is None else 0
        queries = query[:, :, begin:end].reshape(kv_heads, -1, spec.key_dim)
        scores = torch.bmm(queries, key[:, :seen].transpose(1, 2)).view(kv_heads, -1, size, seen)
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        scores[..., masked:].add_(chunk.bias[begin:end, masked:seen])
        weights = softmax_with_sinks(scores, spec.sinks, kv_heads, -1, 1, 1).view(kv_heads, -1, seen)
        mixed = torch.bmm(weights, value[:, :seen]).view(kv_heads, -1, size, spec.value_dim)
        output[begin:end] = mixed.permute(2, 0, 1, 3)
    return output.view(count, spec.heads, spec.value_dim)
