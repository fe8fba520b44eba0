"""Drafts for trained text: the greedy tokens stay the same, and a good part of the drafts is accepted.

Acceptance measured when this was written, in bfloat16: look-up 0.91 on copying and 0.75 on summarising; the int4 draft 0.98 over all.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.worker.exactness.harness import Engine
from tests.worker.exactness.test_speculation import DRAFT, accepted

from fairlead_worker.model.draft import load_draft
from fairlead_worker.model.loader import LoadedModel, load_model

TEXT = """\
The lighthouse at Port Ellery was built in 1871 from grey granite. Its lamp burned whale oil until 1904, when the keeper, Agnes Morrow, \
fitted an electric arc. In 1932 a storm broke the lantern glass and the keeper rowed out to warn the mail boat by hand. Today the tower \
is a small museum with a kitchen garden."""
COPY, SUMMARY, FREE = (
    f"Repeat this text exactly, word for word:\n\n{TEXT}",
    f"Summarise this text in two sentences:\n\n{TEXT}",
    "Write a short story about a fox.",
)
QUESTIONS = (COPY, SUMMARY, FREE)
NGRAM = {"speculative_method": "ngram", "speculative_break_even": 10_000}
TOKENS = 64


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> LoadedModel:
    return load_model(f"file://{smollm2}")


def serve(loaded: LoadedModel, prompts: list[list[int]], draft: LoadedModel | None = None, **settings: object) -> tuple[list[int], Engine]:
    engine = Engine(loaded, chunk=512, pages=128, settings=settings, draft=draft)  # type: ignore[arg-type]  # settings of the scheduler
    return engine.serve(prompts, max_tokens=TOKENS), engine  # type: ignore[return-value]


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel, encode: Callable[[str], list[int]]) -> dict[str, list[int]]:
    """Greedy tokens of each question alone."""
    return {question: serve(loaded, [encode(question)])[0] for question in QUESTIONS}


@pytest.mark.parametrize(("question", "bound"), [(COPY, 0.5), (SUMMARY, 0.25), (FREE, 0.0)], ids=["copy", "summary", "free"])
def test_look_ups_in_the_prompt(
    loaded: LoadedModel, plain: dict[str, list[int]], encode: Callable[[str], list[int]], question: str, bound: float
) -> None:
    tokens, engine = serve(loaded, [encode(question)], **NGRAM)
    assert tokens == plain[question]
    right, guessed = accepted(engine)
    assert right >= bound * guessed and guessed > (40 if bound else 0)


def test_the_models_own_int4_weights_draft_for_it(
    loaded: LoadedModel, smollm2: Path, plain: dict[str, list[int]], encode: Callable[[str], list[int]]
) -> None:
    draft = load_draft(f"file://{smollm2}", loaded, quantization="int4")
    assert draft.quantization == "int4"
    right = guessed = 0
    for question in QUESTIONS:
        tokens, engine = serve(loaded, [encode(question)], draft, **DRAFT)
        assert tokens == plain[question]
        right, guessed = right + accepted(engine)[0], guessed + accepted(engine)[1]
    assert right >= 0.35 * guessed > 20
