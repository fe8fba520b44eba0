"""Finished answers validate against generated schemas, from an untrained model at temperature 1."""

import json

import jsonschema
import pytest
from tests.worker.grammar.random_schemas import schema
from tests.worker.grammar.serving import Ask, Model, Serving

SAMPLE = range(30)


@pytest.fixture(scope="module")
def answered(model: Model) -> list[tuple[dict[str, object], str, str | None]]:
    """(schema, text, finish) of each, all in one batch together with plain requests."""
    schemas = [schema(seed) for seed in SAMPLE]
    serving = Serving(model, pages=2048)
    asks = [Ask(model.grammar("json", each), max_tokens=300, seed=seed) for seed, each in enumerate(schemas)]
    answers = serving.serve([*asks, *(Ask("", max_tokens=40, seed=seed) for seed in range(4))])
    return [(each, serving.text(answer), answer.finish) for each, answer in zip(schemas, answers, strict=False)]


def test_every_finished_answer_validates(answered: list[tuple[dict[str, object], str, str | None]]) -> None:
    finished = [(each, text) for each, text, finish in answered if finish == "stop"]
    for each, text in finished:
        document = json.loads(text)
        jsonschema.validate(document, each, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    assert len(finished) >= 0.8 * len(answered), "too few were short enough to say anything"


def test_the_others_were_cut_by_their_length(answered: list[tuple[dict[str, object], str, str | None]]) -> None:
    assert {finish for _, _, finish in answered} <= {"stop", "length"}
