"""FlashInfer's fa3 kernels for prefills on Hopper: where they run, and which steps they suit.

They use Hopper's asynchronous copies and products, which fa2 does not. But they give each
query head tiles of 128 queries of its own, and never split the keys of a row over thread blocks (`PrefillSM90Plan` in FlashInfer's
scheduler.cuh, 0.7.2). So a step with few tiles leaves processors idle, and fa2, which does both, is faster.
"""

import logging
from collections.abc import Iterable
from functools import cache

import torch

from fairlead_worker.kernels.base import LayerSpec

logger = logging.getLogger(__name__)


@cache
def is_supported(device: torch.device, float8: bool) -> bool:
    """Return whether fa3 can serve prefills on `device`, as FlashInfer's `determine_attention_backend` decides; log the reason if not.

    float8: the KV cache is in float8, which fa3 takes only with queries in float8.
    """
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    reason = f"compute capability {major}.{minor} is not Hopper's 9.0" if major != 9 else "the KV cache is in float8" if float8 else ""
    if reason:
        logger.info("prefills use FlashInfer's fa2 kernels, not fa3: %s", reason)
    return not reason


def has_enough_tiles(kind: LayerSpec, counts: Iterable[int], processors: int) -> bool:
    """Return whether rows with `counts` queries give every processor a full tile."""
    tile = 192 if kind.value_dim == 64 else 128
    return kind.heads * sum(count // tile for count in counts) >= processors
