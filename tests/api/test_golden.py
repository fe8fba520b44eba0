"""Whole and streamed answers to the same random requests are the same. `make golden` asks 500."""

from tests.api.fleet import Pair
from tests.api.golden import compare

COUNT = 50


async def test_streams_say_what_whole_answers_say(pair: Pair) -> None:
    wrong, refused, said = await compare(pair.urls, COUNT, seed=1)
    assert not wrong, "\n".join(wrong[:3])
    assert refused < COUNT / 10, "nearly all are right requests"
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "with a call", "with a tool use"} <= said.keys(), (
        said
    )
