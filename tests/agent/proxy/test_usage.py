"""Usage in streams, however the bytes are cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fairlead_agent.proxy.usage import EventStream, Usage

STREAM = (
    b'data: {"choices":[{"delta":{"content":"one"}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"\\"usage\\":{ is only text"}}],"usage":null}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
    b"data: [DONE]\n\n"
)
USAGE_EVENT = STREAM[STREAM.index(b'data: {"choices":[],') : STREAM.index(b"data: [DONE]")]


@given(cuts=st.lists(st.integers(0, len(STREAM))), hides=st.booleans(), adds=st.booleans())
def test_a_stream_in_any_pieces(cuts: list[int], hides: bool, adds: bool) -> None:
    stream = EventStream(adds_usage=adds, hides_usage=hides)
    edges = [0, *sorted(cuts), len(STREAM)]
    out = b"".join(stream.feed(STREAM[start:end]) for start, end in itertools.pairwise(edges)) + stream.end()
    expected = STREAM.replace(USAGE_EVENT, b"") if hides else STREAM
    assert out == (expected.replace(b"data: [DONE]", b": usage 7 2 4\n\ndata: [DONE]") if adds else expected)


def test_usage_of_the_responses_and_messages_apis() -> None:
    stream = EventStream(adds_usage=True, hides_usage=False)
    body = b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":5,"output_tokens":1}}}\n\n'
    assert stream.feed(body) + stream.end() == body + b": usage 5 1\n\n"


def test_a_stream_without_usage_gets_no_comment() -> None:
    stream = EventStream(adds_usage=True, hides_usage=True)
    body = b'data: {"choices":[]}\n\ndata: [DONE]\n\n'
    assert stream.feed(body) + stream.end() == body


def test_an_unfinished_event_is_passed_on_at_the_end() -> None:
    stream = EventStream(adds_usage=False, hides_usage=False)
    assert stream.feed(b"data: cut") == b""
    assert stream.end() == b"data: cut"


def test_a_whole_answer_is_read_for_its_usage_only() -> None:
    """Only the usage is decoded: text that is not UTF-8, which no decoder builds, does not hide it."""
    usage = Usage()
    usage.read_answer(b'{"choices":[{"text":"\xff"}],"usage":{"prompt_tokens":7,"completion_tokens":2}}')
    assert usage.text == "7 2"
    for other in (b"[1]", b"not JSON", b'{"usage":[7]}', b'{"usage":"\xff"}'):
        usage = Usage()
        usage.read_answer(other)
        assert usage.text == ""
