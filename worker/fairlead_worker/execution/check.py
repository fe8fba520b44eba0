"""Comparison of two ways to compute a step: a few small steps are tried before one of them serves."""

from collections.abc import Callable, Sequence

import torch

from fairlead_worker.kernels.base import KVSpec, PackedStep

ROW_TOKENS = 40
"""Largest number of tokens in a row of the trial, with a small reserve."""
STEPS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((0, 0, 21), (1, 0, 9)),
    ((0, 21, 1), (1, 9, 6), (2, 0, 3)),
    ((2, 3, 1), (0, 22, 1), (1, 15, 1)),
)
"""Rows as (request, start, count): prompts; a decode beside a later chunk and a new prompt; decodes."""
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.1}
"""Norm of the difference of a position's logits over their own norm.

Rounding to bfloat16 adds up to 0.03 in models of random weights; a different computation is off by far more."""
ROUNDED_TOLERANCE = {"int8": 5e-3, "int4": 0.25}
"""Lower bounds where linear layers round their inputs.

An input close to a half is rounded up on one side and down on the other, which moves more inputs in the next layer. Observed in random
models of 2 to 24 layers: 1e-3 and 0.13 (bfloat16: 0.18). A wrong rope is off by 1.3."""


def tolerance(dtype: torch.dtype, quantization: str) -> float:
    """Return the largest `worst_difference` that rounding explains. quantization: as in `LoadedModel`."""
    return max(TOLERANCE[dtype], ROUNDED_TOLERANCE.get(quantization, 0.0))


def trial_pages(page_size: int) -> int:
    """Return the number of pages that the trial takes."""
    return 3 * -(-ROW_TOKENS // page_size)


def trial_steps(spec: KVSpec, vocabulary: int) -> list[PackedStep]:
    """Return the trial's steps; every token samples."""
    return [trial_step(rows, spec, vocabulary) for rows in STEPS]


def trial_step(rows: Sequence[tuple[int, int, int]], spec: KVSpec, vocabulary: int) -> PackedStep:
    """Return one step of the given rows, in the form of `STEPS`."""
    per_row = -(-ROW_TOKENS // spec.page_size)
    tokens = torch.randint(vocabulary, (3, ROW_TOKENS), generator=torch.Generator().manual_seed(5))
    where = [torch.arange(start, start + count) for _, start, count in rows]
    positions = torch.cat(where)
    pages = [-(-(start + count) // spec.page_size) for _, start, count in rows]
    return PackedStep(
        tokens=torch.cat([tokens[request, start : start + count] for request, start, count in rows]),
        positions=positions,
        slots=torch.cat([request * per_row * spec.page_size + at for (request, _, _), at in zip(rows, where, strict=True)]),
        starts=[start for _, start, _ in rows],
        counts=[count for _, _, count in rows],
        page_indptr=torch.tensor([0, *pages]).cumsum(0).to(torch.int32),
        page_indices=torch.cat([request * per_row + torch.arange(many) for (request, _, _), many in zip(rows, pages, strict=True)]).to(
            torch.int32
        ),
        sampling=torch.arange(len(positions)),
    )


@torch.inference_mode()
def worst_difference(
    want: Callable[[PackedStep], torch.Tensor], got: Callable[[PackedStep], torch.Tensor], steps: list[PackedStep]
) -> float:
    """Return the largest relative difference of a position's logits; infinity if they are not finite."""
    worst = 0.0
    for step in steps:
        expected, actual = want(step).float(), got(step).float()
        if actual.shape != expected.shape:
            return float("inf")
        relative = (actual - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
        worst = max(worst, relative.nan_to_num(float("inf")).max().item())
    return worst
