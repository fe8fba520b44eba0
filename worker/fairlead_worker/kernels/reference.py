"""Reference backend: gather a row's pages, then torch's own attention. Exact and plain; every other backend is compared with it.

It also serves devices without a faster backend. So what all layers share (page gathers, masks) is made once a step, and decode rows of
similar length go together. A row's numbers do not depend on the others: padding is the row's own last page, masked out.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.nn.functional import scaled_dot_product_attention

from fairlead_worker.kernels.base import FLOAT8, CausalMask, KVSpec, LayerSpec, PackedStep, StepContext, make_zeros, pad_page_count
from fairlead_worker.kernels.float8 import round_to_float8
from fairlead_worker.kernels.groups import GroupedStep
from fairlead_worker.kernels.transfer import to_device

GROUP_TOKENS = 65_536
"""Most KV tokens gathered together for a group of decode rows. Bounds scratch memory to a third of a GiB at 8 heads of 128 in float32."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows attended to together: one row with any number of queries, or several with one query each. B rows, Q queries, L keys."""

    tokens: slice | torch.Tensor
    """Indices of the B * Q queries in the packed step."""
    rows: int
    queries: int
    pages: torch.Tensor
    """[B * pages]: the pages gathered; L is pages * page_size."""
    mask: torch.Tensor | None
    """[B, 1, Q, L], true where a query sees a key. None: causal from the first token."""


class ReferenceBackend:
    """Keys and values as [pages, page_size, kv_heads, dim] for each layer."""

    name = "reference"

    def __init__(self, spec: KVSpec, pages: int) -> None:
        self.spec = spec
        self.pages = pages
        # Zeros, not uninitialised memory: masked slots are multiplied by zero, and zero times a stray NaN is NaN.
        keys = [self._storage(layer.kv_heads, layer.key_dim) for layer in spec.stored]
        values = [self._storage(layer.kv_heads, layer.own_value_dim) for layer in spec.stored]
        self._stored = (*keys, *values)
        values = [
            key[..., : layer.value_dim] if layer.value_in_key else value
            for key, value, layer in zip(keys, values, spec.stored, strict=True)
        ]
        self.keys, self.values = ([parts[place] for place in spec.places] for parts in (keys, values))
        self._step = _grouped_step if spec.groups else ReferenceStep
        for sinks in filter(None, (layer.sinks for layer in spec.layers)):
            _sinks(sinks, torch.float32, spec.device)  # copied here, not in the first step

    def _storage(self, kv_heads: int, dim: int) -> torch.Tensor:
        spec = self.spec
        zeros = make_zeros(self.pages, spec.page_size, kv_heads, dim, dtype=spec.copy_dtype, device=spec.device)
        return zeros.view(spec.kv_dtype)

    def _parts(self) -> list[torch.Tensor]:
        """Return the storage of all layers as numbers of `copy_dtype`."""
        return [part.view(self.spec.copy_dtype) for part in self._stored]

    def store(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value [T, kv_heads, dim] into slots [T]."""
        spec = self.spec
        parts = [(self.keys[layer], key), (self.values[layer], value)]
        for part, new in parts[:1] if spec.layers[layer].value_in_key else parts:
            stored = new.to(part.dtype) if spec.scales is None else round_to_float8(new, spec.scale(layer))
            part.view(spec.copy_dtype).flatten(0, 1).index_copy_(0, slots, stored.view(spec.copy_dtype))

    def plan(self, step: PackedStep) -> StepContext:
        return self._step(self, step)

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.index_select(0, pages).flatten(1) for part in self._parts()], 1)

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        parts = self._parts()
        for part, piece in zip(parts, torch.split(content, [part[0].numel() for part in parts], 1), strict=True):
            part.index_copy_(0, pages, piece.view(len(pages), *part.shape[1:]))


class ReferenceStep:
    """One step: groups of rows for each distinct mask among the layers, made on the first request of a layer."""

    def __init__(self, backend: ReferenceBackend, step: PackedStep) -> None:
        self._backend = backend
        self._step = step
        self._groups: dict[CausalMask, list[Group]] = {}

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        backend, scale = self._backend, self._backend.spec.scale(layer)
        spec = backend.spec.layers[layer]
        keys, values = backend.keys[layer], backend.values[layer]
        if spec.source is None:
            backend.store(layer, self._step.slots, key, value)
        if scale != 1:
            spec = replace(spec, scaling=spec.scaling * scale)
        if spec.mask not in self._groups:
            self._groups[spec.mask] = list(plan_groups(self._step, backend.spec, spec.mask))
        output = query.new_empty(query.shape[0], spec.heads, spec.value_dim)
        for group in self._groups[spec.mask]:
            output[group.tokens] = _attend_group(spec, group, query[group.tokens], keys, values)
        return output if scale == 1 else output * scale


def _grouped_step(backend: ReferenceBackend, step: PackedStep) -> GroupedStep:
    return GroupedStep(backend.spec.groups, [ReferenceStep(backend, each) for each in step.of_groups()])


def plan_groups(step: PackedStep, spec: KVSpec, mask: CausalMask) -> list[Group]:
    """Return chunks one by one, and decode rows in groups with a similar number of pages."""
    groups: list[Group] = []
    decodes: dict[int, list[tuple[int, int, int, torch.Tensor]]] = {}
    token = 0
    for start, count, table in zip(step.starts, step.counts, step.tables(), strict=True):
        first_page = mask.first_key(start) // spec.page_size
        visible = table[first_page:]
        if count > 1:
            groups.append(_chunk(token, start, count, first_page, visible, spec, mask))
        else:
            decodes.setdefault(pad_page_count(len(visible)), []).append((token, start, first_page, visible))
        token += count
    for padded, rows in decodes.items():
        size = max(1, GROUP_TOKENS // (padded * spec.page_size))
        groups.extend(_decodes(rows[i : i + size], padded, spec, mask) for i in range(0, len(rows), size))
    return groups


def _chunk(token: int, start: int, count: int, first_page: int, pages: torch.Tensor, spec: KVSpec, mask: CausalMask) -> Group:
    device = spec.device
    tokens = slice(token, token + count)
    if start == 0 and (mask.span is None or count <= mask.span):
        return Group(tokens, 1, count, to_device(pages, device), None)
    keys = torch.arange(first_page * spec.page_size, (first_page + len(pages)) * spec.page_size, device=device)
    queries = torch.arange(start, start + count, device=device)[:, None]
    return Group(tokens, 1, count, to_device(pages, device), ~mask.hides(queries, keys)[None, None])


def _decodes(rows: list[tuple[int, int, int, torch.Tensor]], padded: int, spec: KVSpec, mask: CausalMask) -> Group:
    device = spec.device
    tokens = to_device([token for token, _, _, _ in rows], device)
    queries = to_device([start for _, start, _, _ in rows], device)[:, None]
    offsets = to_device([first for _, _, first, _ in rows], device)[:, None] * spec.page_size
    keys = offsets + torch.arange(padded * spec.page_size, device=device)
    pages = torch.cat([torch.cat((table, table[-1:].expand(padded - len(table)))) for _, _, _, table in rows])
    return Group(tokens, len(rows), 1, to_device(pages, device), ~mask.hides(queries, keys)[:, None, None])


def _attend_group(spec: LayerSpec, group: Group, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend with query [B * Q, heads, key_dim] -> [B * Q, heads, value_dim]."""
    length = group.pages.shape[0] // group.rows * keys.shape[1]
    key = _gather(keys, group.pages, query.dtype).view(group.rows, length, spec.kv_heads, spec.key_dim).transpose(1, 2)
    value = _gather(values, group.pages, query.dtype).view(group.rows, length, spec.kv_heads, spec.value_dim).transpose(1, 2)
    mask = group.mask
    if group.queries == 1:
        # Query heads that share a KV head become several queries of it, so keys need not be repeated.
        query = query.view(group.rows, spec.kv_heads, spec.heads // spec.kv_heads, spec.key_dim)
        output = _attention(spec, query, key, value, mask)
        return output.reshape(group.rows, spec.heads, spec.value_dim)
    query = query.transpose(0, 1)[None]
    if mask is None:
        key, value = key[:, :, : group.queries], value[:, :, : group.queries]
    output = _attention(spec, query, key, value, mask)
    return output[0].transpose(0, 1)


def _gather(storage: torch.Tensor, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return pages of `storage`; float8 is widened to `dtype`."""
    if storage.dtype != FLOAT8:
        return storage.index_select(0, pages)
    return storage.view(torch.uint8).index_select(0, pages).view(FLOAT8).to(dtype)


def _attention(spec: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attend: query [B, heads or kv_heads, Q, key_dim], key and value [B, kv_heads, L, dim]. Without a mask: causal from the first key."""
    if spec.softcap is not None or spec.sinks is not None:
        return _attention_in_steps(spec, query, key, value, mask)
    if mask is not None:
        mask = mask.expand(query.shape[0], 1, query.shape[2], key.shape[2])
    if key.shape[1] == 1:  # views: with enable_gqa torch repeats the keys, of latents for all heads
        key, value = (part.expand(-1, query.shape[1], -1, -1) for part in (key, value))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=spec.scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


@lru_cache(256)
def _sinks(sinks: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(sinks, dtype=dtype, device=device)


def softmax_with_sinks(scores: torch.Tensor, sinks: tuple[float, ...] | None, *shape: int) -> torch.Tensor:
    """Return the weights of scores [..., L]. `shape`: of the sinks, so that they are broadcast to the scores' heads."""
    if sinks is None:
        return scores.softmax(-1)
    column = _sinks(sinks, scores.dtype, scores.device).view(shape)
    return torch.cat((scores, column.expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1]


def _attention_in_steps(
    spec: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attend as transformers' eager attention: torch's fused kernel has neither soft caps nor sinks."""
    if query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(-1, -2) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    weights = softmax_with_sinks(scores.masked_fill(~mask, float("-inf")).float(), spec.sinks, scores.shape[1], -1, 1)
    return weights.to(query.dtype) @ value
