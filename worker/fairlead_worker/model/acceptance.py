"""The one rule by which a computation may replace another: it is not farther from float32 than what it replaces.

Both are compared with the same computation in float32 (`model.exact`) on tokens of a text. So outlier channels, large norm weights and the
depth of a trained model move the bound by as much as they move the numbers.
"""

import torch

MARGIN = 1.25
"""How much farther the mean of all rows may be: two ways of rounding are never equally far."""
WORST_MARGIN = 2.0
"""The same of the farthest row, which varies more than a mean. It finds a mistake that only some rows show."""
FLOOR = 2.0**-13
"""Distance that always passes, in units of a row's size. Sums of float32 in another order moved trained models of 18 and 30 layers by 1e-5;
one rounding to bfloat16 moves a number by up to 2**-9."""


def distances(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return each row's distance to `exact` in units of that row's size, [rows]; infinity where `got` is not finite. Both [..., width]."""
    exact = exact.flatten(0, -2).float()
    off: torch.Tensor = torch.linalg.vector_norm(got.flatten(0, -2).float() - exact, dim=1)
    size: torch.Tensor = torch.linalg.vector_norm(exact, dim=1)
    return (off / size.clamp(min=1e-30)).nan_to_num(float("inf"), float("inf"))


def find_refusal(candidate: torch.Tensor, replaced: torch.Tensor, exact: torch.Tensor) -> str:
    """Return why `candidate` may not replace `replaced`; empty: it may. All [..., width]; `exact` in float32."""
    if candidate.shape != exact.shape:
        return f"it gives {list(candidate.shape)} numbers, not {list(exact.shape)}"
    new, old = distances(candidate, exact), distances(replaced, exact)
    if not (new.isfinite().all() and exact.isfinite().all()):
        return "it gives numbers that are not finite" if exact.isfinite().all() else "float32 itself gives numbers that are not finite"
    for what, margin, ours, theirs in (
        ("on average", MARGIN, new.mean().item(), old.mean().item()),
        ("at most", WORST_MARGIN, new.max().item(), old.max().item()),
    ):
        if not ours <= margin * theirs + FLOOR:
            return f"it is {what} {ours:.1e} from float32, and what it would replace {theirs:.1e}, both relative to the size"
    return ""


def sample_input(width: int, like: torch.Tensor, count: int = 5) -> torch.Tensor:
    """Return [1, count, width] of fixed random numbers, on the device and in the dtype of `like`."""
    generator = torch.Generator().manual_seed(width)
    return torch.randn(1, count, width, generator=generator).to(like)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Return whether two tensors are equal but for the order of a sum and a rounding to their dtype, in units of the largest number."""
    tolerance = max(2 * torch.finfo(want.dtype).eps, 1e-5)
    scale = want.abs().max().float().item() or 1.0
    return bool((got.float() - want.float()).abs().max().item() <= scale * tolerance)
