"""The rule by which a computation may replace another."""

import pytest
import torch

from fairlead_worker.model.acceptance import FLOOR, find_refusal

EXACT = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 5, 40)[:, None]


def off_by(size: float, seed: int = 2) -> torch.Tensor:
    """Return `EXACT` with noise of `size` times each row's norm."""
    noise = torch.randn(EXACT.shape, generator=torch.Generator().manual_seed(seed))
    return EXACT + size * noise / noise.norm(dim=1, keepdim=True) * EXACT.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("size", [1e-5, 1e-2, 0.3])
def test_whatever_the_rounding_one_that_is_as_near_is_accepted(size: float) -> None:
    assert not find_refusal(off_by(size), off_by(size, 3), EXACT)
    assert not find_refusal(off_by(size / 3), off_by(size, 3), EXACT)


@pytest.mark.parametrize("size", [1e-2, 0.3])
def test_one_that_is_farther_is_refused(size: float) -> None:
    assert "on average" in find_refusal(off_by(2 * size), off_by(size, 3), EXACT)


def test_noise_of_float32_is_accepted_beside_an_exact_one() -> None:
    assert not find_refusal(off_by(FLOOR / 2), EXACT, EXACT)
    assert find_refusal(off_by(3 * FLOOR), EXACT, EXACT)


def test_one_wrong_row_is_refused() -> None:
    wrong = off_by(0.01)
    wrong[7] = EXACT[7] * 1.03
    assert "at most" in find_refusal(wrong, off_by(0.01, 3), EXACT)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_even_if_both_have_them(value: float) -> None:
    wrong = off_by(0.01)
    wrong[3, 5] = value
    assert find_refusal(wrong, wrong, EXACT) == "it gives numbers that are not finite"


def test_another_shape_is_refused() -> None:
    assert "numbers, not" in find_refusal(EXACT[:, :-1], EXACT, EXACT)
