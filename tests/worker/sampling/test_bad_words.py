"""Bad words: equal to a plain search of the output, for any draft before a position, and every row keeps a choice."""

import random

import numpy as np
import torch
from tests.worker.execution.planner import make_request

from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.sampling.bad_words import forbid_words
from fairlead_worker.sampling.masks import Masks
from fairlead_worker.sampling.sampler import sample

VOCABULARY = 12


def test_the_token_that_would_complete_a_word_is_forbidden() -> None:
    draw = random.Random(1)
    for _ in range(300):
        words = tuple(tuple(draw.choices(range(4), k=draw.randint(1, 3))) for _ in range(draw.randint(1, 4)))
        prompt, output, draft = (draw.choices(range(4), k=draw.randint(low, 4)) for low in (1, 0, 0))
        request = make_request("r", prompt, Sampling(max_tokens=9, bad_words=words))
        request.tokens.extend(output)
        (row,) = forbid_words(torch.zeros(1, VOCABULARY), [request], [draft])
        forbidden = {token for token in range(VOCABULARY) if any(_ends_with([*output, *draft, token], word) for word in words)}
        assert {token for token, value in enumerate(row.tolist()) if value != 0} == forbidden


def _ends_with(tokens: list[int], word: tuple[int, ...]) -> bool:
    return tuple(tokens[-len(word) :]) == word


def test_others_rows_are_as_they_were() -> None:
    plain, other = make_request("a", [1], Sampling(max_tokens=9)), make_request("b", [1], Sampling(max_tokens=9, bad_words=((5,),)))
    logits = torch.randn(2, VOCABULARY)
    kept = forbid_words(logits, [plain, other])
    assert torch.equal(kept[0], logits[0])
    assert kept[1, 5] == float("-inf")
    assert forbid_words(logits, [plain, plain]) is logits


def test_where_nothing_else_could_come_a_bad_word_may() -> None:
    request = make_request("r", [1], Sampling(max_tokens=9, allowed_token_ids=(5,), bad_words=((5,),), temperature=1.0))
    tokens, _ = sample(torch.zeros(1, VOCABULARY), [request])
    assert tokens == [5]


def test_a_bad_word_that_alone_has_the_form_asked_for_may_come() -> None:
    request = make_request("r", [1], Sampling(max_tokens=9, bad_words=((5,), (6,)), temperature=0.0))
    logits = torch.zeros(1, VOCABULARY)
    masks = Masks([0], np.array([[1 << 5]], np.uint32))
    assert sample(logits, [request], masks=masks)[0] == [5] and not masks.dead
    both = Masks([0], np.array([[1 << 5 | 1 << 7]], np.uint32))
    assert sample(logits, [request], masks=both)[0] == [7] and not both.dead


def test_the_greedy_choice_is_the_next_best() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    request = make_request("r", [1], Sampling(max_tokens=9, temperature=0.0, bad_words=((1,), (9,), (3, 2))))
    assert sample(logits, [request])[0] == [2]
    request.tokens.append(3)
    assert sample(logits, [request])[0] == [3], "after 3, no 2"
