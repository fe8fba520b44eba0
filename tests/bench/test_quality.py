"""What `bench quality` computes from logits: likelihood, distance, divergence, agreement; and the files of K types that it writes."""

import numpy as np
import pytest
import torch
from bench.quality.k_quants import quantize_k
from bench.quality.likelihood import split
from bench.quality.scores import Distributions, Scores
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

LEVELS = {Type.Q4_K: 16, Type.Q5_K: 32, Type.Q6_K: 64}


def test_distances_are_zero_only_to_the_reference() -> None:
    reference = Scores(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([5, 6, 7]))
    other = Scores(torch.tensor([-1.5, -1.5, -3.0]), torch.tensor([5, 6, 8]))
    assert reference.nll == 2 and other.nll == 2, "likelihood alone does not see changes that cancel"
    assert reference.distance(reference) == 0 and reference.agreement(reference) == 1
    assert other.distance(reference) == pytest.approx(1 / 3) and other.agreement(reference) == pytest.approx(2 / 3)


def test_the_divergence_of_blocks_is_that_of_the_whole() -> None:
    chooser = torch.Generator().manual_seed(3)
    reference, other = (torch.randn(50, 100, generator=chooser) for _ in range(2))
    kept = Distributions(50, 100)
    for block in reference.split(7):
        kept.fill(block)
    divergence, itself = kept.compare(), kept.compare()
    for block in other.split(9):
        divergence.add(block)
    for block in reference.split(11):
        itself.add(block)
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    assert divergence.mean == pytest.approx((p.exp() * (p - q)).sum(1).mean().item(), rel=1e-5)
    assert abs(itself.mean) < 1e-6


@pytest.mark.parametrize(("tokens", "sizes"), [(1900, [1900]), (1901, [951, 950]), (5, [5]), (4000, [1334, 1334, 1332])])
def test_a_text_is_cut_into_equal_prompts(tokens: int, sizes: list[int]) -> None:
    prompts = split(list(range(tokens)))
    assert [len(prompt) for prompt in prompts] == sizes
    assert [token for prompt in prompts for token in prompt] == list(range(tokens))


@pytest.mark.parametrize("kind", LEVELS, ids=lambda kind: kind.name)
def test_k_types_are_within_a_step_of_the_weights(kind: Type) -> None:
    """As the package gguf reads them. A step is a group's span over the levels; scales of 6 and 8 bits add a part of the span."""
    weights = np.random.default_rng(5).standard_normal((8, 512)).astype(np.float32)
    weights[0] = 0
    weights[1] = np.abs(weights[1])
    weights[2, ::32] *= 20
    widened = dequantize(quantize_k(weights, kind), kind)
    assert widened.shape == weights.shape and not widened[0].any()
    group = 16 if kind == Type.Q6_K else 32
    size = np.abs(weights.reshape(8, -1, 256)).max(-1).repeat(256 // group, axis=-1)
    worst = np.abs(widened - weights).reshape(8, -1, group).max(-1)
    assert (worst <= 2 * size / LEVELS[kind]).all()
