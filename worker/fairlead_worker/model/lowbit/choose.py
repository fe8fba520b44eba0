"""Find out which Triton kernels for weights of few bits run right on a device."""

import logging
from functools import cache

import torch

from fairlead_worker.model.acceptance import find_refusal
from fairlead_worker.model.lowbit.experts import PlainProduct, Product, Scales, draw_weights, find_route, multiply_exactly
from fairlead_worker.model.lowbit.rows import GROUP, Rounder, TorchRounder, dequantized

logger = logging.getLogger(__name__)


@cache
def choose_rounder(device: torch.device, blocks: bool = False) -> Rounder:
    """Return Triton's kernels; torch's, with the reason in the log, where Triton's do not run on `device` or give other numbers."""
    plain = TorchRounder(blocks)
    try:
        from fairlead_worker.model.lowbit.kernels.rows import TritonRounder

        made = TritonRounder(blocks)
        inputs = torch.linspace(-3, 3, 5 * 256, device=device, dtype=torch.bfloat16).view(5, 256)
        if refusal := find_refusal(dequantized(made.round(inputs)), dequantized(plain.round(inputs)), inputs.float()):
            raise RuntimeError(refusal)
    except Exception as error:  # Triton raises its own kinds; it also needs a C compiler, or a driver that was compiled before
        logger.warning("torch rounds activations to float8, in four kernels each: Triton's do not run: %s: %s", type(error).__name__, error)
        return plain
    return made


@cache
def load_triton_product() -> Product:
    """Return Triton's kernel. Raises what Triton raises where it is not installed."""
    from fairlead_worker.model.lowbit.kernels.experts import TritonProduct

    return TritonProduct()


def find_problem(device: torch.device, scales: Scales, rounds: bool, experts: int) -> str:
    """Return why `device` does not multiply such weights right; empty if it does. Also compiles the kernel's variants for `experts`."""
    drawn = torch.Generator().manual_seed(6)
    weights = draw_weights(experts, 2 * GROUP, 3 * GROUP, scales, drawn, device)
    rows = choose_rounder(device, scales is Scales.BLOCKS) if rounds else None
    numbers = torch.arange(experts, device=device)
    try:
        product = load_triton_product()
        for tokens in choose_trial_sizes(experts):
            inputs = torch.randn(tokens, 3 * GROUP, generator=drawn).to(torch.bfloat16).to(device)
            route = find_route(torch.randint(experts, (tokens, 2), generator=drawn).to(device), numbers)
            given = inputs if rows is None else rows.round(inputs)
            got, plain = (each.multiply(given, weights, route, 2) for each in (product, PlainProduct()))
            exact = multiply_exactly(inputs.float(), weights, route, 2)
            if refusal := find_refusal(got, plain, exact):
                return f"products of {tokens} tokens: {refusal}"
    except Exception as error:  # Triton raises its own kinds; it also needs a C compiler, or a driver that was compiled before
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no reason given'}"
    return ""


def choose_trial_sizes(experts: int) -> tuple[int, ...]:
    """Return numbers of tokens with two experts each, one for each variant of the kernel."""
    from fairlead_worker.model.lowbit.kernels.experts import TILES

    return tuple(max(1, experts * (most + 1) // 2) for most in (0, *(tile.most for tile in TILES[:-1])))
