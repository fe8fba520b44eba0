"""Groups of layers with pages of their own: which layers of a model share a page, and a step over several groups.

Pages of all groups come from one pool, so they have one size: each group has as many layers as the layers that read all tokens, the last
one perhaps fewer (vLLM's rule too). A storage place is then shared by one layer of each group.
"""

from collections.abc import Sequence

import torch

from fairlead_worker.cache.groups import CacheGroups
from fairlead_worker.kernels.base import GroupPages, KVSpec, LayerSpec, PackedStep, StepContext

WASTE = 1.2
"""Most storage places for each layer: a group may have fewer layers than its pages have places. Gemma 3 needs 1.00 (12B) to 1.13 (27B)."""


def group_layers(layers: Sequence[LayerSpec], max_model_len: int) -> tuple[tuple[int, ...], str]:
    """Return the group of each layer, and () and the reason if all layers share their pages.

    A window or chunk that no sequence exceeds counts as none. Layers of several windows are grouped together, and keep what the widest one
    reads.
    """
    own = [number for number, layer in enumerate(layers) if layer.source is None]
    windowed = [_is_windowed(layers[number], max_model_len) for number in own]
    full = windowed.count(False)
    if full == len(own):
        return (), "no layer has a window below --max-model-len"
    if len({layers[number].chunk for number, has_window in zip(own, windowed, strict=True) if has_window}) > 1:
        return (), "its layers have chunks of several sizes"
    if len({(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in layers}) > 1:
        return (), "its layers have keys and values of several sizes"
    if not full:
        return (0,) * len(layers), ""
    groups = 1 + -(-(len(own) - full) // full)
    if groups * full > WASTE * len(own):
        return (), f"{full} layers read all tokens and {len(own) - full} a window, which do not fit into pages of one size"
    of = {number: 1 + sum(windowed[:place]) // full if windowed[place] else 0 for place, number in enumerate(own)}
    return tuple(of[number if layer.source is None else layer.source] for number, layer in enumerate(layers)), ""


def choose_groups(spec: KVSpec, max_model_len: int, has_draft: bool) -> tuple[tuple[int, ...], str]:
    """Return the same for a model, perhaps with a draft model, whose layers use the pages of the first group."""
    groups, why_one = group_layers(spec.layers, max_model_len)
    if groups and not any(groups) and has_draft:
        return (), "a draft model reads all tokens"
    return groups, why_one


def describe_groups(groups: CacheGroups | None, why_one: str) -> str:
    """Return how many groups there are, and what for; of one group, why."""
    if groups is None:
        return f"1 group of layers: {why_one}"
    kept = f"the latest chunk of {groups.window} tokens" if groups.chunked else f"the last {groups.window} tokens"
    if groups.count == 1:
        return f"1 group of layers, which keeps {kept}"
    return f"{groups.count} groups of layers, of which {groups.windowed} keep {kept}"


def cache_groups(spec: KVSpec, max_model_len: int) -> CacheGroups | None:
    """Return what the prefix cache must know of the groups; None: one page holds all layers."""
    if not spec.groups:
        return None
    windowed = [layer for layer in spec.layers if _is_windowed(layer, max_model_len)]
    full = int(len(windowed) < len(spec.layers))
    return CacheGroups(full, spec.num_groups - full, max(layer.mask.span or 0 for layer in windowed), windowed[0].chunk is not None)


def _is_windowed(layer: LayerSpec, max_model_len: int) -> bool:
    return layer.mask.span is not None and layer.mask.span < max_model_len


def spread(step: PackedStep, spec: KVSpec) -> PackedStep:
    """Return `step`, whose page tables are of whole pages, with pages of its own for each group: `num_groups` for each whole page."""
    if not spec.groups:
        return step
    count, size = spec.num_groups, spec.page_size
    pages, offsets = step.slots // size, step.slots % size
    first, *others = (GroupPages((pages * count + group) * size + offsets, step.page_indices * count + group) for group in range(count))
    return step.with_pages(first, others)


class GroupedStep:
    """One planned step over several groups: a step of the same backend for each. Implements `StepContext`."""

    def __init__(self, groups: Sequence[int], steps: Sequence[StepContext]) -> None:
        """`groups`: of each layer."""
        self._groups, self._steps = groups, steps

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self._steps[self._groups[layer]].attend(layer, query, key, value)
