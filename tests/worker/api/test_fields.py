"""docs/api.md is current, and true: what it calls refused is refused, and what it calls ignored changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.fields import ENDPOINTS, NOTES, OPENAI, PAGE, REFUSED, rendered
from fairlead_worker.api.sampling import Wanted, wanted
from fairlead_worker.api.schema import parse

ROOT = Path(__file__).parents[3]
VALUES: dict[str, Any] = {"suffix": "end", "functions": [], "function_call": "auto", "user": "anna"}


def understood(path: str, **fields: Any) -> Wanted:
    return wanted(parse(json.dumps({"seed": 1, **fields}).encode(), ENDPOINTS[path]), {})


def test_the_page_is_what_the_schema_says() -> None:
    assert (ROOT / PAGE).read_text() == rendered(), f"{PAGE} is stale: run `make api-docs`"


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_page_is_true(path: str) -> None:
    known = set(ENDPOINTS[path].__struct_fields__)
    for field in REFUSED.keys() & known:
        with pytest.raises(ApiError) as refused:
            understood(path, **{field: VALUES[field]})
        assert refused.value.status == 400 and refused.value.param == field
    assert not known & set(OPENAI[path]), "a field that is known now is no longer ignored"
    assert all(understood(path, **{field: {"any": 1}}) == understood(path) for field in OPENAI[path])


def test_nothing_is_said_of_fields_that_there_are_not() -> None:
    known = {field for body in ENDPOINTS.values() for field in body.__struct_fields__}
    assert known >= {*NOTES, *REFUSED}
