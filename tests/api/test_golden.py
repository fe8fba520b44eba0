"""Whole and streamed answers to the same random requests are equal. `make golden` sends 500."""

from tests.api.fleet import Pair
from tests.api.golden import compare

COUNT = 50


async def test_streamed_answers_equal_whole_answers(pair: Pair) -> None:
    wrong, refused, said = await compare(pair.urls, COUNT, seed=1)
    assert not wrong, "\n".join(wrong[:3])
    assert refused < COUNT / 10, "nearly all requests are valid"
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "with a call", "with a tool use"} <= said.keys(), (
        said
    )
