"""Trained models keep their likelihood in every setting. Bounds are distances to transformers in float32, on the same text."""

import math
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch
from bench.quality.engine import score
from bench.quality.likelihood import MODELS, TEXT
from bench.quality.plain import load_plain, score_plain
from bench.quality.scores import Scores
from bench.quality.settings import SETTINGS
from tests.real_models import convert, real_model
from transformers import AutoTokenizer

from fairlead_worker.model.acceptance import MARGIN
from fairlead_worker.native.library import native

TOKENS = 300
BFLOAT16_CHANGE, INT4_CHANGE = 0.003, 0.05
"""Largest change of the NLL, in nats per token."""
NOISE = 4
"""Standard errors that a mean over the text may be off by chance."""
SETTING = {setting.name: setting for setting in SETTINGS}
needs_library = pytest.mark.skipif(native() is None, reason="the native library, which quantizes weights, does not load at this CPU level")


@dataclass(frozen=True)
class Measured:
    """One model through transformers, in both dtypes."""

    source: Path
    scores: dict[str, Scores] = field(default_factory=dict)

    @cached_property
    def folder(self) -> Path:
        return convert(self.source, "float32")

    @cached_property
    def prompt(self) -> list[int]:
        tokens: list[int] = AutoTokenizer.from_pretrained(self.folder)(TEXT.read_text(encoding="utf-8"))["input_ids"]
        return tokens[:TOKENS]

    @cached_property
    def float32(self) -> Scores:
        return score_plain(load_plain(self.folder, torch.float32), [self.prompt])

    @cached_property
    def rounding(self) -> float:
        """The distance of transformers in bfloat16."""
        return score_plain(load_plain(self.folder, torch.bfloat16), [self.prompt]).distance(self.float32)

    def score(self, name: str) -> Scores:
        """Return the scores of a setting of `bench quality`, by the product's engine."""
        if name not in self.scores:
            engine, _ = SETTING[name].open(self.source, self.folder, TOKENS)
            self.scores[name] = score(engine, [self.prompt])
        return self.scores[name]

    def change(self, scores: Scores) -> float:
        return abs(scores.nll - self.float32.nll)


def chance(distance: float) -> float:
    """Return how far the NLL moves by chance if each log-probability moves by `distance` in either direction."""
    return NOISE * distance * math.sqrt(math.pi / 2 / TOKENS)


@cache
def measure(name: str) -> Measured:
    return Measured(real_model(MODELS[name]))


@pytest.fixture(params=MODELS)
def measured(request: pytest.FixtureRequest) -> Measured:
    return measure(request.param)


def test_float32_is_that_of_transformers(measured: Measured) -> None:
    scores = measured.score("float32")
    assert scores.distance(measured.float32) < 1e-4, "up to the order of sums"
    assert scores.agreement(measured.float32) > 0.998


def test_bfloat16_is_not_farther_from_float32_than_that_of_transformers(measured: Measured) -> None:
    scores = measured.score("bfloat16")
    assert measured.change(scores) <= BFLOAT16_CHANGE
    assert scores.distance(measured.float32) <= MARGIN * measured.rounding


@needs_library
def test_int8_is_within_three_times_the_rounding_of_bfloat16(measured: Measured) -> None:
    """Weights and inputs of linear layers have 7 bits and a sign; bfloat16 has 8 significant bits, but a scale for each number."""
    scores = measured.score("int8")
    distance = scores.distance(measured.float32)
    assert distance <= 3 * measured.rounding
    assert measured.change(scores) <= chance(distance), "the changes have no direction"
    assert distance > measured.score("bfloat16").distance(measured.float32), "the weights have been rounded"


def test_a_published_gguf_file_is_within_three_times_the_rounding_of_bfloat16(measured: Measured) -> None:
    """Its blocks are the weights of the float32 model, so that only inputs are rounded, on CPUs with kernels to 8 bits."""
    scores = measured.score("GGUF as published")
    distance = scores.distance(measured.float32)
    assert distance <= 3 * measured.rounding
    assert measured.change(scores) <= chance(distance), "the changes have no direction"


@needs_library
def test_int4_is_good_enough_to_offer() -> None:
    """Its distance is larger than its change: the weights lose 12 bits, and a text's likelihood hardly notices."""
    smollm2 = measure("smollm2")
    scores = smollm2.score("int4")
    assert smollm2.change(scores) <= INT4_CHANGE
    assert scores.distance(smollm2.float32) > smollm2.rounding, "the weights have been rounded"
