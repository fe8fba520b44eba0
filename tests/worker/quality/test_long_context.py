"""SmolLM2 over a long text: the same likelihood whole, in chunks, behind a cached prefix, after a preemption and from the host tier."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from bench.quality.contexts import WAYS, by_quarter, in_chunks, long_prompt
from bench.quality.plain import load_plain, score_plain
from tests.real_models import SMOLLM2, real_folder

from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.native.library import native

CONTEXT = 1024
CHOSEN = ("chunks of 512", "prefix cached", "preempted", "prefix from the host tier")
"""Of `bench quality --contexts`, which runs all of them over 8,192 tokens."""
FLAT = 0.01
"""Nats per token by which a quarter may differ from float32: a wrong position or page costs whole nats."""
pytestmark = pytest.mark.skipif(native() is None, reason="bits are equal in any batch only with the native library")


@dataclass(frozen=True)
class Whole:
    """A prompt in one step."""

    loaded: LoadedModel
    prompt: list[int]
    logprobs: torch.Tensor


@pytest.fixture(scope="module")
def whole() -> Whole:
    folder = real_folder(SMOLLM2, "float32")
    loaded, prompt = load_model(str(folder), dtype="bfloat16"), long_prompt(folder, CONTEXT)
    return Whole(loaded, prompt, in_chunks(loaded, prompt, 0))


def test_no_quarter_is_less_likely_than_in_float32(whole: Whole) -> None:
    reference = score_plain(load_plain(whole.loaded.path, torch.float32), [whole.prompt]).logprobs
    for ours, wanted in zip(by_quarter(whole.logprobs), by_quarter(reference), strict=True):
        assert ours == pytest.approx(wanted, abs=FLAT)


@pytest.mark.parametrize("way", [WAYS[name] for name in CHOSEN], ids=CHOSEN)
def test_every_way_has_the_bits_of_the_whole_prompt(way: Callable[[LoadedModel, list[int]], torch.Tensor], whole: Whole) -> None:
    logprobs = way(whole.loaded, whole.prompt)
    computed = ~logprobs.isnan()
    assert computed[len(whole.prompt) // 2 :].all()
    assert torch.equal(logprobs[computed], whole.logprobs[computed])
