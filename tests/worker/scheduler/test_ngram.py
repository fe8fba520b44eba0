"""Prompt lookup: equal to a plain search, and cheap."""

import random
import sys
from array import array
from types import FrameType

import pytest

from fairlead_worker.scheduler import ngram
from fairlead_worker.scheduler.ngram import NgramIndex


def search(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """The same by looking everywhere: the longest agreement before the end, the latest of equals."""
    best, best_length = 0, shortest - 1
    for end in range(len(tokens) - 1, shortest - 1, -1):
        length = 0
        while length < longest and length < end and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length > best_length:
            best, best_length = end, length
    text = list(tokens)
    for place in range(count if best else 0):
        text.append(text[best + place])
    return text[len(tokens) :]


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 2), (2, 5), (3, 4)])
@pytest.mark.parametrize("vocabulary", [2, 6, 40])
def test_it_finds_what_a_plain_search_finds(shortest: int, longest: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_CANDIDATES", 1 << 30)
    draw = random.Random(vocabulary)
    tokens = array("I", [])
    index = NgramIndex(tokens, shortest, longest)
    for _ in range(300):
        tokens.extend(draw.choices(range(vocabulary), k=draw.choice([1, 1, 2, 7])))
        if draw.random() < 0.7:
            assert index.propose(6) == search(list(tokens), shortest, longest, 6)


def test_a_repeating_text_is_continued_as_a_repetition() -> None:
    tokens = array("I", [9, 1, 2, 3, 1, 2, 3, 1])
    assert NgramIndex(tokens, 2, 5).propose(8) == [2, 3, 1, 2, 3, 1, 2, 3]
    assert NgramIndex(array("I", [4, 4, 4]), 2, 5).propose(3) == [4, 4, 4]
    assert NgramIndex(array("I", [4]), 2, 5).propose(3) == []


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    tokens = array("I", [1, 2, 3] * 2000)
    index = NgramIndex(tokens, 2, 5)
    assert [bool(index.propose(2)) for _ in range(4)] == [False, False, True, True]


def test_a_proposal_costs_the_same_however_long_the_text() -> None:
    def lines_of_a_proposal(length: int) -> int:
        tokens = array("I", [7, 7, 8] * length)
        index = NgramIndex(tokens, 2, 5)
        while not index.propose(4):
            pass
        tokens.append(7)
        count = 0

        def seen(frame: FrameType, event: str, argument: object) -> object:
            nonlocal count
            count += event == "line"
            return seen

        sys.settrace(seen)
        try:
            index.propose(4)
        finally:
            sys.settrace(None)
        return count

    assert lines_of_a_proposal(50) == lines_of_a_proposal(5000) < 100
