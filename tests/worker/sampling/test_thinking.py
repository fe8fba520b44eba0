"""Thinking budgets: no more reasoning than allowed, its end marker once and whole, and every other token as without a budget."""

import random
from array import array
from itertools import product

import numpy as np
import pytest
import torch
from tests.worker.execution.planner import make_request

from fairlead_worker.api.output.thinking_markers import ThinkingMarkers
from fairlead_worker.ipc.messages import Sampling, ThinkingBudget
from fairlead_worker.sampling.masks import Masks
from fairlead_worker.sampling.sampler import sample

VOCABULARY = 8
BLANK = 0
MARKERS = [((1,), (2,)), ((1, 3), (2, 4, 2, 5)), ((1,), (2, 2, 3))]


def find(tokens: list[int], marker: tuple[int, ...]) -> int:
    return next((at for at in range(len(tokens)) if tuple(tokens[at : at + len(marker)]) == marker), -1)


def generate(sampling: Sampling, logits: torch.Tensor, prompt: tuple[int, ...] = (6,)) -> list[int]:
    """Return the output for logits [steps, vocabulary], one step after the other."""
    request = make_request("r", list(prompt), sampling)
    for row in logits:
        (token,), _ = sample(row[None], [request])
        request.tokens.append(token)
    return request.tokens[len(prompt) :].tolist()


@pytest.mark.parametrize(("seed", "temperature"), list(product(range(40), (0.0, 1.0))))
def test_reasoning_ends_at_its_budget_and_every_token_before_is_the_same(seed: int, temperature: float) -> None:
    chance = random.Random(seed)
    start, end = chance.choice(MARKERS)
    tokens, used = chance.randrange(6), chance.choice([None, 0, 0, 2])
    budget = ThinkingBudget(tokens, start, end, (BLANK,), used)
    torch.manual_seed(seed)
    logits = torch.randn(24, VOCABULARY)
    for at, token in enumerate([*chance.choice([(), (BLANK,), (BLANK, BLANK)]), *start] if used is None else ()):
        logits[at, token] = 99.0
    plain = generate(Sampling(30, temperature, seed=seed), logits)
    bounded = generate(Sampling(30, temperature, seed=seed, thinking=budget), logits)
    begun = 0 if used is not None else find(plain, start) + len(start)
    own_end = find(plain[begun:], end)
    left = max(0, tokens - (used or 0))
    assert bounded[: begun + left] == plain[: begun + left]
    if 0 <= own_end <= left - len(end):
        assert bounded == plain, "the model ended its reasoning in time"
        return
    reasoning = bounded[begun:]
    closed = find(reasoning, end)
    assert left - len(end) < closed <= left, "neither more reasoning nor a second marker"
    free = begun + closed + len(end)
    assert len(bounded) == len(plain) and bounded[free:] == plain[free:], "the noise of a position depends on no other"


def test_nothing_is_forced_outside_reasoning() -> None:
    torch.manual_seed(1)
    logits = torch.randn(12, VOCABULARY)
    logits[0, 5] = 99.0
    logits[1, 1] = 99.0  # a start marker within the answer
    budget = ThinkingBudget(0, (1,), (2,), (BLANK,))
    assert generate(Sampling(30, 0.0, thinking=budget), logits) == generate(Sampling(30, 0.0), logits)


def test_the_forced_end_precedes_the_requests_other_rules_and_leaves_other_rows_alone() -> None:
    rules = {"allowed_token_ids": (5,), "bad_words": ((2,),), "logit_bias": ((2, -100.0),), "stop_token_ids": (2,), "min_tokens": 9}
    bounded = make_request("a", [6], Sampling(30, 0.0, thinking=ThinkingBudget(0, (1,), (2,), used=0), **rules))  # type: ignore[arg-type]
    other, plain = make_request("b", [6], Sampling(30, 0.0, **rules)), make_request("c", [6], Sampling(30, 0.0))  # type: ignore[arg-type]
    logits = torch.tensor([[0.0, 0.0, 0.0, 7.0, 0.0, 0.0, 0.0, 0.0]] * 3)
    assert sample(logits, [bounded, other, plain])[0] == [2, 5, 3]


def test_the_end_is_forced_where_a_grammar_allows_it_beside_other_tokens() -> None:
    request = make_request("r", [6], Sampling(30, 0.0, thinking=ThinkingBudget(0, (1,), (2,), used=0)))
    masks = Masks([0], np.array([[1 << 2 | 1 << 4]], np.uint32))
    logits = torch.tensor([[0.0, 0.0, 0.0, 7.0, 5.0, 0.0, 0.0, 0.0]])
    assert sample(logits, [request], masks=masks)[0] == [2] and not masks.dead


def test_a_forced_token_has_the_models_own_log_probability() -> None:
    request = make_request("r", [6], Sampling(30, 0.0, logprobs=1, thinking=ThinkingBudget(0, (1,), (2,), used=0)))
    logits = torch.tensor([[0.0, 0.0, 1.0, 7.0, 0.0, 0.0, 0.0, 0.0]])
    (token,), [(reported,)] = sample(logits, [request])
    assert (token, reported.top_ids) == (2, (3,))
    assert reported.chosen == pytest.approx(logits.log_softmax(1)[0, 2].item())


def test_a_preempted_request_is_tracked_again() -> None:
    request = make_request("r", [6], Sampling(30, 0.0, thinking=ThinkingBudget(2, (1,), (2,), used=0)))
    request.tokens.extend([4, 4])
    assert sample(torch.zeros(1, VOCABULARY), [request])[0] == [2]
    request.tokens.append(2)
    assert sample(torch.zeros(1, VOCABULARY), [request])[0] == [0]


def test_the_reasoning_of_a_prompt_counts_only_while_it_is_open() -> None:
    markers = ThinkingMarkers(start=(1, 2), end=(3,), blank=())
    for tokens, expected in (([1, 2, 7, 8], 2), ([1, 2, 7, 3, 8], 0), ([1, 2, 3, 1, 2, 9], 1), ([7, 8], 0)):
        assert markers.count_after_start(array("I", tokens)) == expected
