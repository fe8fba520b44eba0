"""The input of a custom tool as a stream."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_worker.api.output.custom_input import CustomInput, read_input


@given(text=st.text(), sizes=st.lists(st.integers(1, 9), min_size=1), escaped=st.booleans(), cut=st.integers(0, 40))
def test_parts_add_up_to_the_input(text: str, sizes: list[int], escaped: bool, cut: int) -> None:
    """Also of an answer that was cut, and between the halves of an escaped character."""
    arguments = json.dumps({"input": text}, ensure_ascii=escaped)
    arguments = arguments[: len(arguments) - cut] if cut < len(arguments) else arguments
    custom, parts, at = CustomInput(), [], 0
    while at < len(arguments):
        size = sizes[at % len(sizes)]
        parts.append(custom.add(arguments[at : at + size]))
        at += size
    parts.append(custom.finish())
    shown, whole = "".join(parts), read_input(arguments)
    assert shown == whole
    if not cut:
        assert whole == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"patch": "p"}', "p"),
        ('{"a": "p", "b": "q"}', '{"a": "p", "b": "q"}'),
        ("plain", "plain"),
        ("", ""),
        ("[1]", "[1]"),
        ('{"input": 5}', '{"input": 5}'),
    ],
)
def test_other_arguments_are_not_lost(arguments: str, expected: str) -> None:
    for size in (1, 12, 99):
        custom = CustomInput()
        parts = [custom.add(arguments[at : at + size]) for at in range(0, len(arguments), size)]
        assert "".join(parts) + custom.finish() == read_input(arguments) == expected
