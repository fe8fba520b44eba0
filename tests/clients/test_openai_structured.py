"""Structured output as its users ask for it: `parse()` with pydantic models, JSON modes, and vLLM's forms in `extra_body`."""

import json
import re
from enum import StrEnum
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field
from tests.clients.either import each, opened, settled
from tests.clients.endpoints import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Who is there?"}],
    "seed": 4,
    "max_completion_tokens": 400,
}


class Colour(StrEnum):
    red, blue = "red", "blue"


class Pet(BaseModel):
    kind: Colour
    age: int = Field(ge=0, le=30)


class Person(BaseModel):
    name: str = Field(pattern="^[A-Z][a-z]{1,6}$")
    pets: list[Pet] = Field(max_length=2)
    friend: Pet | None


async def test_a_pydantic_model_is_parsed(api: Any) -> None:
    answer = await settled(api.chat.completions.parse(**ASKED, response_format=Person, n=2))
    for choice in answer.choices:
        person = choice.message.parsed
        assert isinstance(person, Person) and re.fullmatch("[A-Z][a-z]{1,6}", person.name) and all(pet.age <= 30 for pet in person.pets)
        assert json.loads(choice.message.content) == json.loads(person.model_dump_json())


async def test_a_pydantic_model_is_streamed(api: Any) -> None:
    whole = await settled(api.chat.completions.parse(**ASKED, response_format=Person))
    parsed = []
    async with opened(api.chat.completions.stream(**ASKED, response_format=Person)) as stream:
        async for event in each(stream):
            if event.type == "content.done":
                parsed.append(event.parsed)
        final = await settled(stream.get_final_completion())
    assert parsed == [whole.choices[0].message.parsed] == [final.choices[0].message.parsed]


async def test_a_truncated_answer_is_reported_as_truncated(api: Any) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        await settled(api.chat.completions.parse(**ASKED | {"max_completion_tokens": 3}, response_format=Person))


async def test_json_by_response_format(api: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 5}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "count", "strict": True, "schema": schema}}
    answer = await settled(api.chat.completions.create(**ASKED, response_format=form))
    assert json.loads(answer.choices[0].message.content)["n"] in (3, 4, 5)
    free = await settled(api.chat.completions.create(**ASKED | {"seed": 1}, response_format={"type": "json_object"}))
    assert free.choices[0].message.content.lstrip().startswith("{")
    text = await settled(api.chat.completions.create(**ASKED, response_format={"type": "text"}))
    assert text.choices[0].message.content


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-f]{4}-[0-9]{2}"}}, "[a-f]{4}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "<" [xy]+ ">"'}}, "<[xy]+>"),
        ({"structured_outputs": {"json": {"enum": ["a", 1]}}}, '"a"|1'),
        ({"guided_choice": ["grün", "rot 🙂"]}, "grün|rot 🙂"),
    ],
    ids=["regex", "choice", "grammar", "json", "guided"],
)
async def test_vllms_structured_output_fields(api: Any, form: dict[str, Any], pattern: str) -> None:
    chat = await settled(api.chat.completions.create(**ASKED, extra_body=form))
    assert re.fullmatch(pattern, chat.choices[0].message.content)
    text = await settled(api.completions.create(model=MODEL, prompt="x", max_tokens=400, seed=2, extra_body=form))
    assert re.fullmatch(pattern, text.choices[0].text)


async def test_an_unsupported_schema_is_refused_by_name(api: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strng"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        await settled(api.chat.completions.create(**ASKED, response_format=form))
    assert refused.value.param is not None and refused.value.param.startswith("response_format") and "strng" in refused.value.message
