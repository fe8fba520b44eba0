"""Prompts that attach to pages of their own step get the tokens that they get alone: every backend, adapters, a draft model."""

import random
from pathlib import Path

import pytest
from tests.lora import adapter_of
from tests.models import VOCABULARY, save_model
from tests.worker.exactness.harness import Engine, generate
from tests.worker.kernels.test_attention import needs_library

from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import LoadedModel, load_model

FAMILIES = ("llama", "gemma3", "bitnet")
"""Gemma 3 has layers with windows, and queries that are normed; BitNet runs by transformers' code."""
every_backend = pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_library), "cpu", "reference"])


def make_wave() -> list[list[int]]:
    """12 prompts over 3 prefixes, 192 tokens long the shortest, each a part of the one before it."""
    chooser = random.Random(3)
    stem = [chooser.randrange(2, VOCABULARY) for _ in range(320)]
    return [stem[: 320 - 64 * (number % 3)] + [chooser.randrange(2, VOCABULARY) for _ in range(1 + 7 * number)] for number in range(12)]


WAVE = make_wave()
COMPUTED = 320 + sum(1 + 7 * number for number in range(12))


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, list[list[int]]]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_model(request.param, folder)
    return load_model(str(folder)), generate(model, WAVE)


@pytest.mark.parametrize(
    ("backend", "native_decoder"),
    [
        pytest.param("native", True, marks=needs_library),
        pytest.param("native", False, marks=needs_library),
        ("cpu", False),
        ("reference", False),
    ],
)
@pytest.mark.parametrize("page_size", [16, 5])
def test_a_wave_is_one_pass(served: tuple[LoadedModel, list[list[int]]], backend: str, native_decoder: bool, page_size: int) -> None:
    loaded, expected = served
    engine = Engine(loaded, chunk=0, page_size=page_size, backend=backend, native_decoder=native_decoder)
    assert engine.serve(WAVE) == expected
    if page_size == 16:
        assert engine.forwards[0] == COMPUTED, "the stem once, and what each has to itself"
    assert engine.forwards[1:] == [12] * 19, "and from there on all decode together"
    assert engine.serve(WAVE) == expected, "what was shared is what is cached"


@every_backend
def test_with_a_draft_model(served: tuple[LoadedModel, list[list[int]]], backend: str) -> None:
    """The model drafts for itself: a wrong draft would reveal wrong or missing draft KV."""
    loaded, expected = served
    settings = {"speculative_method": "draft", "speculative_break_even": 10_000}
    engine = Engine(loaded, chunk=0, backend=backend, settings=settings, draft=loaded)  # type: ignore[arg-type]  # each setting has its field's type
    assert engine.serve(WAVE) == expected
    assert engine.forwards[0] == COMPUTED
    drafts = engine.scheduler.load().drafts
    assert drafts is not None and drafts.accepted > 0.97 * drafts.tokens > 100


@every_backend
def test_with_adapters(backend: str, tmp_path: Path) -> None:
    """Equal prompts share pages only within their own adapter."""
    prompts = [prompt for prompt in WAVE[:6] for _ in range(2)]
    numbers = [index % 2 for index in range(12)]
    want = [generate(save_model("llama", tmp_path / "base"), WAVE[:6]), generate(adapter_of("llama", tmp_path / "a", 1), WAVE[:6])]
    loaded = load_model(f"file://{tmp_path / 'base'}")
    adapters = AdapterSet(loaded, 1, 64)
    adapters.load(1, "a", "file:///a", tmp_path / "a")
    engine = Engine(loaded, chunk=0, backend=backend, adapters=adapters)
    assert want[0] != want[1]
    answers = engine.serve_counted(prompts, adapters=numbers)
    assert [tokens for tokens, _ in answers] == [want[number][index // 2] for index, number in enumerate(numbers)]
    assert [cached for _, cached in answers] == [0] * 2 + [256] * 2 + [192] * 2 + [320] * 2 + [256] * 2 + [192] * 2
    assert engine.forwards[0] == 2 * (320 + sum(1 + 7 * number for number in range(6)))
