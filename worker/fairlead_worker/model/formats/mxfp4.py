"""gpt-oss's experts in MXFP4 (`quant_method: mxfp4`), transposed in its files. They are widened: no product here takes this layout."""

from collections.abc import Collection

import torch

from fairlead_worker.model.formats.base import Format, Parts, Target
from fairlead_worker.model.lowbit.experts import widen_mx

BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4(Format):
    """Weights of all experts of a layer: blocks [experts, outputs, groups, 16] and scales [experts, outputs, groups] uint8.

    A rank's part of a group has a scale too, and no dimension of groups (`sharding.scales.Bytes`).
    """

    method = "mxfp4"

    def __init__(self, names: Collection[str]) -> None:
        self.needed = {each + a: (each + b,) for each in ("gate_up_proj", "down_proj") for a, b in ((BLOCKS, SCALES), (SCALES, BLOCKS))}
        weights = {name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS)}
        super().__init__({weight: {"blocks": weight + BLOCKS, "scales": weight + SCALES} for weight in weights if weight + SCALES in names})

    def reason_to_widen(self, target: Target) -> str:
        return "experts in MXFP4 have no product in gpt-oss's layout"

    def widen(self, weight: str, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        return widen_mx(parts["blocks"].flatten(2), parts["scales"]).transpose(1, 2).to(dtype).contiguous()
