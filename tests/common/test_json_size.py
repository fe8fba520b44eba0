"""Bounds of a JSON text, against the objects that a decoder makes of it."""

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairlead_common import json_size
from fairlead_common.json_size import (
    LONG,
    MAX_DEPTH,
    MAX_LONG_DIGITS,
    MAX_OBJECTS,
    MAX_STRINGS,
    MAX_VALUES,
    JsonTooLarge,
    check_json,
    read_float,
)

texts = st.text(st.sampled_from('ab,:[]{}"\\/\n1é🙂'), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(texts, inner, max_size=6),
    max_leaves=40,
)


def count(value: Any) -> tuple[int, int, int]:
    """Return a value's objects, lists and keys, all its nodes, and its depth."""
    if not isinstance(value, dict | list):
        return 0, 1, 0
    keys = len(value) if isinstance(value, dict) else 0
    inner = [count(one) for one in (value.values() if isinstance(value, dict) else value)]
    objects, nodes = (sum(one[place] for one in inner) for place in (0, 1))
    return 1 + keys + objects, 1 + keys + nodes, 1 + max((one[2] for one in inner), default=0)


def is_refused(raw: bytes) -> bool:
    try:
        check_json(raw)
    except JsonTooLarge:
        return True
    return False


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values, st.booleans(), st.sampled_from([None, 1]))
def test_the_size_bounds_the_nodes_and_is_exact_where_it_decides(value: Any, ascii: bool, indent: int | None) -> None:
    raw = json.dumps(value, ensure_ascii=ascii, indent=indent).encode()
    objects, nodes, depth = count(value)
    upper, exact = check_json(raw), check_json(raw, exact_above=-1)
    assert upper.objects >= objects and upper.values >= nodes
    assert exact.objects == objects and nodes <= exact.values <= nodes + objects, "an empty list has no value, but counts one"
    with pytest.MonkeyPatch.context() as patch:
        for name, most, refused in (
            ("OBJECTS", objects, False),
            ("OBJECTS", objects - 1, True),
            ("DEPTH", depth, False),
            ("DEPTH", depth - 1, True),
        ):
            with patch.context() as inner:
                inner.setattr(json_size, f"MAX_{name}", most)
                assert is_refused(raw) == refused, (name, most)
        patch.setattr(json_size, "MAX_VALUES", exact.values)
        assert not is_refused(raw)
        patch.setattr(json_size, "MAX_VALUES", nodes - 1)
        assert is_refused(raw)


def long_digits(raw: bytes) -> int:
    """Return the digits of long numbers in whole steps. The slow reference."""
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", raw)
    return sum(len(run) // LONG * LONG for run in re.findall(rb"[0-9]+", outside))


lengths = st.integers(1, 3 * LONG) | st.sampled_from([LONG - 1, LONG, LONG + 1, 2 * LONG - 1, 2 * LONG])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(lengths, st.sampled_from(["%s", "-%s", "1.%s", '"%s"', '"\\"%s"', "1e1,%s", " %s "])), max_size=9),
    st.integers(0, 3),
)
def test_digits_of_long_numbers_are_bounded_and_those_of_texts_are_not(numbers: list[tuple[int, str]], less: int) -> None:
    raw = f"[{','.join(form % ('7' * digits) for digits, form in numbers)}]".encode()
    digits = long_digits(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "MAX_LONG_DIGITS", digits - less * LONG)
        assert is_refused(raw) == (less > 0)


@pytest.mark.parametrize("length", [LONG, 1500, 4000])
def test_as_many_long_digits_as_are_allowed_pass(length: int) -> None:
    number = b"1" * length
    most = MAX_LONG_DIGITS // (length // LONG * LONG)
    check_json(b"[" + b",".join([number] * most) + b"]")
    with pytest.raises(JsonTooLarge, match="send shorter numbers"):
        check_json(b"[" + b",".join([number] * (most + 1)) + b"]")
    check_json(b'["' + b'","'.join([number] * (most + 1)) + b'"]')


MANY = 2_000_000
BOMBS = {
    "lists": b'{"a":[' + b"[]," * MANY + b"[]]}",
    "objects": b'{"a":[' + b"{}," * MANY + b"{}]}",
    "keys": b"{" + b",".join(b'"%d":1' % number for number in range(MAX_OBJECTS)) + b"}",
    "equal keys": b"{" + b'"":1,' * MAX_OBJECTS + b'"":1}',
    "numbers": b"[" + b"1," * MANY + b"1]",
    "strings": b"[" + b'"",' * MANY + b'""]',
    "escaped strings": b"[" + rb'"\"",' * (MANY * 3 // 4) + b'""]',
    "deep lists": b"[" * 600 + b"]" * 600,
    "deep objects": b'{"a":' * 600 + b"1" + b"}" * 600,
    "an end of a string that is none": b'["' + rb"\\\"" * 9 + b'",' + b"[]," * MANY,
    "long numbers": b"[" + b",".join([b"1" * 4000] * 2000) + b"]",
    "long fractions": b"[" + b",".join([b"0." + b"1" * 1000] * 2_000) + b"]",
    "a quote outside": b"[" + b"[]," * MANY + b'\\"' * 9 + b"]",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_text_that_costs_too_much_is_refused_with_the_bound_and_the_fix(kind: str) -> None:
    with pytest.raises(JsonTooLarge, match=r"(at most|more than) \d+ .*: (send fewer|send shorter numbers|nest them less deeply)"):
        check_json(BOMBS[kind], 131_072)


REAL = {
    "token ids of a long prompt": json.dumps({"prompt": list(range(131_072))}),
    "texts of an embedding": json.dumps({"input": ["some, [words]: {of} a text"] * 2048}),
    "300,000 token ids of an embedding": json.dumps({"input": [list(range(150))] * 2000}),
    "a long chat": json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "a, b"}]}] * 3000}),
    "many tools": json.dumps({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": {"type": "b"}}}}] * 1000}),
    "logit_bias": json.dumps({"logit_bias": {str(token): -100 for token in range(20_000)}}),
    "digits of an image": json.dumps({"url": "1" * (8 << 20)}),
    "hexadecimal texts": json.dumps({"input": ["0123456789abcdef" * 64, "7" * 2000] * 1024}),
    "punctuation": json.dumps({"prompt": '[]{}:,"\\' * 900_000}),
}


@pytest.mark.parametrize("kind", REAL)
def test_real_requests_pass(kind: str) -> None:
    check_json(REAL[kind].encode(), 131_072)


def test_texts_are_bounded_before_they_are_cut_out() -> None:
    texts = b'["' + b'","'.join([b"a:"] * (MAX_STRINGS + 1)) + b'"]'
    with pytest.raises(JsonTooLarge, match=f"{MAX_STRINGS} are allowed"):
        check_json(texts, 1 << 20)
    check_json(texts.replace(b'"a:",', b"", 1), 1 << 20)


def test_an_embedding_request_of_token_ids_passes_with_any_context() -> None:
    check_json(json.dumps({"input": [[1] * 146] * 2048}).encode(), 512)


def test_the_longest_prompt_adds_its_token_ids() -> None:
    ids = b"[" + b"1," * (MAX_VALUES + 1000) + b"1]"
    with pytest.raises(JsonTooLarge):
        check_json(ids)
    check_json(ids, 2000)
    assert MAX_DEPTH < 900, "below the recursion limit of decoders"


@given(st.floats(allow_nan=False, allow_infinity=False) | st.from_regex(r"-?[0-9][.][0-9]{1,60}(e[+-][0-9]{1,3})?", fullmatch=True))
def test_numbers_are_those_of_the_decoder_itself(number: float | str) -> None:
    text = b'{"a":[%b]}' % str(number).encode()
    results = []
    for decoder in (msgspec.json.Decoder(), msgspec.json.Decoder(float_hook=read_float)):
        try:
            results.append(decoder.decode(text))
        except msgspec.ValidationError as error:
            results.append(str(error))
    assert results[0] == results[1]
