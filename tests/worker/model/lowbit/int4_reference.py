"""torch's int4 kernel, explicitly: its layout, as its CUDA source fills it, and its product, by torch's kernel for CPUs."""

import torch
from torch.nn import functional

from fairlead_worker.model.lowbit.int4 import Int4Linear, unpack


def layout(codes: torch.Tensor, tiles: int) -> torch.Tensor:
    """Fill [outputs / 8, inputs / (16 * tiles), 32, tiles / 2] lane by lane (`matrix_to_m16n8k16_Bint4_layout`, torch 2.9)."""
    outputs, inputs = codes.shape
    made = torch.zeros(outputs // 8, inputs // (16 * tiles), 32, tiles // 2, dtype=torch.int64)
    for tile in range(outputs // 8):
        for outer in range(inputs // (16 * tiles)):
            for lane in range(32):
                for pair in range(tiles // 2):
                    begin = (outer * tiles + 2 * pair) * 16 + lane % 4 * 2
                    even = [int(codes[8 * tile + lane // 4, begin + 8 * step]) for step in range(4)]
                    odd = [int(codes[8 * tile + lane // 4, begin + 8 * step + 1]) for step in range(4)]
                    made[tile, outer, lane, pair] = sum(code << 4 * place for place, code in enumerate(even + odd))
    return torch.where(made >= 1 << 31, made - (1 << 32), made).to(torch.int32)


def multiply(layer: Int4Linear, rows: torch.Tensor) -> torch.Tensor:
    """As `Int4Linear.multiply`, on a CPU: the same scales and zeros, and codes in the layout for CPUs."""
    assert rows.is_contiguous() and rows.dtype == torch.bfloat16 and layer.pairs.is_contiguous() and layer.weight.is_contiguous()
    missing = -layer.out_features % 16  # that kernel takes outputs in sixteens
    codes = functional.pad(unpack(layer.weight).to(torch.int32), (0, 0, 0, missing))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    pairs = functional.pad(layer.pairs, (0, 0, 0, missing))
    answer: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, layer.group, pairs)
    return answer[:, : layer.out_features].contiguous()
