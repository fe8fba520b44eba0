"""Schemas of generated pydantic models are accepted, and pydantic reads what an untrained model writes under their grammars."""

import datetime
import enum
import ipaddress
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import pydantic
import pytest
from pydantic import Field
from tests.worker.grammar.serving import Answer, Ask, Model, Serving

SAMPLE = range(40)


class Colour(enum.Enum):
    RED, BLUE = "red", 2


class Chain(pydantic.BaseModel):
    value: int
    next: "Chain | None" = None


SCALARS: tuple[Any, ...] = (
    bool,
    None,
    Colour,
    Literal["a", 1, None],
    Annotated[int, Field(ge=0, lt=90, multiple_of=5)],
    Annotated[float, Field(ge=0, le=1, multiple_of=0.1)],
    Annotated[float, Field(gt=-3, lt=4)],
    Annotated[str, Field(min_length=1, max_length=6)],
    Annotated[str, Field(pattern=r"^\d{2,3}-[a-z]$")],
    datetime.date,
    uuid.UUID,
    pydantic.UUID4,
    ipaddress.IPv4Address,
    pydantic.IPvAnyAddress,
    Annotated[pydantic.SecretStr, Field(max_length=5)],
    Path,
    Chain,
)
"""Without types that random tokens seldom end."""


def random_type(chance: random.Random, depth: int) -> Any:
    inner: Callable[[], Any] = lambda: random_type(chance, depth - 1)  # noqa: E731
    makers: list[Callable[[], Any]] = [
        lambda: chance.choice(SCALARS),
        lambda: Union[inner(), chance.choice((bool, None))],  # noqa: UP007  # `|` does not take None twice
        lambda: Annotated[list[inner()], Field(max_length=2)],  # type: ignore[misc]
        lambda: tuple[inner(), bool],  # type: ignore[misc]
        lambda: Annotated[dict[Literal["x", "y"], inner()], Field()],  # type: ignore[misc]
        lambda: random_model(chance, depth - 1),
        lambda: tagged_union(chance, depth - 1),
    ]
    return (chance.choice(makers) if depth > 0 else makers[0])()


def random_model(chance: random.Random, depth: int, **tag: Any) -> type[pydantic.BaseModel]:
    fields = {f"f{at}": (random_type(chance, depth), ...) for at in range(chance.randint(1, 3))}
    forbid = pydantic.ConfigDict(extra=chance.choice(["forbid", "ignore"]))
    return pydantic.create_model(f"M{chance.randrange(10**9)}", __config__=forbid, **(tag | fields))  # type: ignore[no-any-return, call-overload]


def tagged_union(chance: random.Random, depth: int) -> Any:
    """Return a discriminated union. Its tags are optional in the schema if they have defaults."""
    first, second = (
        random_model(chance, depth, kind=(Literal[name], name if chance.random() < 0.7 else ...))  # type: ignore[valid-type]
        for name in ("one", "two")
    )
    return Annotated[first | second, Field(discriminator="kind")]


@pytest.fixture(scope="module")
def answered(model: Model) -> list[tuple[type[pydantic.BaseModel], Answer, str]]:
    models = [random_model(random.Random(seed), 3) for seed in SAMPLE]
    serving = Serving(model, pages=2048)
    asks = [Ask(model.grammar("json", each.model_json_schema()), max_tokens=400, seed=seed) for seed, each in enumerate(models)]
    return [(each, answer, serving.text(answer)) for each, answer in zip(models, serving.serve(asks), strict=True)]


def test_pydantic_reads_every_finished_answer(answered: list[tuple[type[pydantic.BaseModel], Answer, str]]) -> None:
    finished = [(each, text) for each, answer, text in answered if answer.finish == "stop"]
    assert len(finished) >= 0.7 * len(answered), "too few were short enough to say anything"
    for each, text in finished:
        each.model_validate_json(text)
