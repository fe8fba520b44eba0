"""Sizes of FlashInfer's workspace, which holds partial results of rows whose keys are split over thread blocks."""

import torch

from fairlead_worker.kernels.base import LayerSpec

LEAST_WORKSPACE = 128 << 20
"""FlashInfer's own recommendation."""
TILE = 128
"""Most queries of a thread block, times the query heads per KV head."""


def workspace_bytes(kinds: list[LayerSpec], multiprocessors: int) -> int:
    """Return the bytes for partial results of rows whose keys are split over thread blocks.

    Latents need a third of the least (`MLAPlan`: two tiles of 64 queries and heads per multiprocessor, 16 bits).
    Two blocks per multiprocessor, a float32 output for each query of a tile (`PrefillPlan` in FlashInfer's scheduler.cuh; before 0.7
    without the division by the query heads per KV head).
    """
    most = (2 * multiprocessors * TILE * (kind.value_dim + 1) * 4 * (kind.heads // kind.kv_heads) for kind in kinds)
    return max((LEAST_WORKSPACE, *most))


def graph_workspace_bytes(kinds: list[LayerSpec], rows: int, multiprocessors: int) -> int:
    """Return the same for a graph of `rows` decodes of `kinds` on tensor cores.

    FlashInfer then counts every row's keys as split, whether they are or not (`PrefillPlan` with enable_cuda_graph, 0.7.2).
    """

    def needed(kind: LayerSpec) -> int:
        group = kind.heads // kind.kv_heads
        tile = next(tile for tile in (16, 64, TILE) if group <= tile or tile == TILE)
        blocks = max(2 * multiprocessors // kind.kv_heads, -(-rows * group // tile) + rows - 1)
        return kind.heads * -(-blocks * tile // group) * (kind.value_dim + 1) * 4 + 32  # 32 bytes align two arrays

    return max(map(needed, kinds), default=0)


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for other devices."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
