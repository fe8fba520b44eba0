"""`client.embeddings`, blocking and asynchronous, through worker and router alike."""

from math import sqrt
from typing import Any

import openai
import pytest
from openai.types import CreateEmbeddingResponse
from tests.clients.either import settled
from tests.clients.endpoints import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")
TEXTS = ["a ring that guides a rope", "where it should run"]


async def create(api: Any, given: Any, **options: Any) -> CreateEmbeddingResponse:
    answer = await settled(api.embeddings.create(model=MODEL, input=given, **options))
    assert isinstance(answer, CreateEmbeddingResponse)
    return answer


async def test_vectors_are_numbers_in_either_encoding(lenient: Any) -> None:
    coded = await create(lenient, TEXTS)  # the client requests base64 and decodes it
    plain = await create(lenient, TEXTS, encoding_format="float")
    assert coded.object == "list" and coded.model == MODEL and [each.index for each in coded.data] == [0, 1]
    for one, other in zip(coded.data, plain.data, strict=True):
        assert one.object == "embedding" and len(one.embedding) == 64
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert sqrt(sum(value * value for value in one.embedding)) == pytest.approx(1, abs=1e-3)
    assert coded.usage.prompt_tokens == coded.usage.total_tokens > 4


async def test_one_text_and_token_ids(lenient: Any) -> None:
    alone, among = await create(lenient, TEXTS[0]), await create(lenient, TEXTS)
    assert alone.data[0].embedding == pytest.approx(among.data[0].embedding, abs=1e-3)
    ids = await create(lenient, [[5, 6, 7], [300]])
    assert len(ids.data) == 2 and ids.usage.prompt_tokens == 4
    assert len((await create(lenient, [5, 6, 7])).data) == 1


async def test_dimensions_work_or_are_refused_by_name(api: Any) -> None:
    try:
        short = (await create(api, TEXTS[0], dimensions=16)).data[0].embedding
    except openai.BadRequestError as refused:
        assert refused.param == "dimensions"
    else:
        assert len(short) == 16 and sqrt(sum(value * value for value in short)) == pytest.approx(1, abs=1e-3)


async def test_invalid_requests_name_the_field(api: Any) -> None:
    for given, options, param in (
        ([], {}, "input"),
        ("", {}, "input"),
        ("word " * 5000, {}, "input"),
        ("x", {"encoding_format": "hex"}, "encoding_format"),
        ("x", {"dimensions": 0}, "dimensions"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await create(api, given, **options)
        assert refused.value.param == param, (param, refused.value.message)
    with pytest.raises(openai.NotFoundError):
        await settled(api.embeddings.create(model="nobody", input="x"))
