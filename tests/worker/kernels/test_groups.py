"""Which layers share pages."""

from dataclasses import replace

import pytest
import torch

from fairlead_worker.cache.groups import CacheGroups
from fairlead_worker.kernels.base import KVSpec, LayerSpec
from fairlead_worker.kernels.groups import cache_groups, group_layers

FULL = LayerSpec(8, 2, 16, 16, 0.25)
WINDOWED, CHUNKED = replace(FULL, window=1024), replace(FULL, chunk=1024)


@pytest.mark.parametrize(
    ("layers", "groups", "pages"),
    [
        ([WINDOWED, FULL] * 12, (1, 0) * 12, CacheGroups(1, 1, 1024)),
        (([WINDOWED] * 5 + [FULL]) * 8, None, CacheGroups(1, 5, 1024)),
        (([WINDOWED] * 5 + [FULL]) * 10 + [WINDOWED] * 2, None, CacheGroups(1, 6, 1024)),
        ([WINDOWED] * 32, (0,) * 32, CacheGroups(0, 1, 1024)),
        ([WINDOWED, replace(FULL, window=512), FULL], (1, 2, 0), CacheGroups(1, 2, 1024)),
        (([CHUNKED] * 3 + [FULL]) * 12, None, CacheGroups(1, 3, 1024, chunked=True)),
    ],
    ids=["gpt-oss 20B", "Gemma 3 12B", "Gemma 3 27B", "Mistral 0.1", "two windows", "Llama 4"],
)
def test_groups_have_pages_of_one_size(layers: list[LayerSpec], groups: tuple[int, ...] | None, pages: CacheGroups) -> None:
    found, reason = group_layers(layers, max_model_len=8192)
    assert not reason and (groups is None or found == groups)
    spec = KVSpec(tuple(layers), 16, torch.float32, torch.device("cpu"), groups=found)
    assert cache_groups(spec, 8192) == pages and spec.num_groups == pages.count
    assert len(set(zip(found, spec.places, strict=True))) == len(layers), "no two layers of a group share a place"
    assert max(spec.places) + 1 == len(spec.stored) and spec.page_bytes == len(spec.stored) * 2 * 2 * 16 * 16 * 4
    assert pages.count * len(spec.stored) <= 1.2 * len(layers)


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([FULL, replace(FULL, window=8192)], "no layer has a window"),
        ([FULL, replace(WINDOWED, kv_heads=4)], "several sizes"),
        ([FULL, WINDOWED, CHUNKED], "chunks of several sizes"),
        ([FULL] * 28 + [WINDOWED] * 4, "28 layers read all tokens and 4 a window"),
    ],
    ids=["long windows", "sizes", "windows and chunks", "waste"],
)
def test_other_models_have_one_group(layers: list[LayerSpec], reason: str) -> None:
    found, why = group_layers(layers, max_model_len=8192)
    assert found == () and reason in why


def test_layers_that_read_the_kv_of_others_store_none() -> None:
    """As in Gemma 3n: the last layers read those of the last earlier layer of their kind."""
    layers = (WINDOWED, FULL, WINDOWED, FULL, replace(WINDOWED, source=2), replace(FULL, source=3))
    found, _ = group_layers(layers, max_model_len=8192)
    assert found == (1, 0, 1, 0, 1, 0)
    for groups, places in (((), (0, 1, 2, 3, 2, 3)), (found, (0, 0, 1, 1, 1, 1))):
        spec = KVSpec(layers, 16, torch.float32, torch.device("cpu"), groups=groups)
        assert spec.places == places and len(spec.stored) == max(places) + 1
        assert spec.page_bytes == len(spec.stored) * 2 * 2 * 16 * 16 * 4
