"""Sampling: greedy is exact, filters are transformers' own, and a row's choice is its own affair."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fairlead_worker.engine.request import Request
from fairlead_worker.execution.filters import filter_logits
from fairlead_worker.execution.noise import uniform
from fairlead_worker.execution.sampler import sample
from fairlead_worker.messages import Sampling

from .planner import make_request

GREEDY = Sampling(max_tokens=1, temperature=0)


def requests(samplings: Sequence[Sampling], prompt: int = 5) -> list[Request]:
    return [make_request(str(i), range(prompt), sampling) for i, sampling in enumerate(samplings)]


def test_greedy_is_the_largest_logit() -> None:
    logits = torch.randn(20, 1000)
    tokens, logprobs = sample(logits, requests([GREEDY] * 20))
    assert tokens == logits.argmax(1).tolist()
    assert logprobs == []


SETTINGS = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_k": 64},
    {"top_k": 65},
    {"top_k": 1},
    {"top_p": 0.5},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.3, "top_k": 300, "top_p": 0.95},
    {"top_k": 10_000},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_filters_keep_what_transformers_keeps(setting: dict[str, float]) -> None:
    torch.manual_seed(1)
    logits = torch.randn(8, 500) * 3
    sampling = Sampling(max_tokens=1, **setting)  # type: ignore[arg-type]  # top_k is an int in every setting
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    want = warpers(torch.zeros(8, 1, dtype=torch.int64), logits.clone())
    torch.testing.assert_close(filter_logits(logits / sampling.temperature, [sampling] * 8), want)


def test_a_row_chooses_the_same_alone_and_in_any_company() -> None:
    torch.manual_seed(2)
    logits = torch.randn(len(SETTINGS) + 1, 700) * 2
    samplings = [Sampling(max_tokens=1, seed=i, **setting) for i, setting in enumerate(SETTINGS)] + [GREEDY]  # type: ignore[arg-type]  # as above
    together, _ = sample(logits, requests(samplings))
    backwards, _ = sample(logits.flip(0), requests(samplings[::-1]))
    alone = [sample(logits[i : i + 1], requests([s]))[0][0] for i, s in enumerate(samplings)]
    assert together == backwards[::-1] == alone


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0, float("-inf")]])
    count = 20_000
    tokens, _ = sample(logits.expand(count, -1), requests([Sampling(max_tokens=1, seed=s) for s in range(count)]))
    frequency = np.bincount(tokens, minlength=5) / count
    assert frequency[4] == 0
    np.testing.assert_allclose(frequency, logits.softmax(1)[0].numpy(), atol=0.015)


def test_seed_and_position_both_change_the_choice_and_nothing_else_does() -> None:
    logits = torch.zeros(1, 10_000)

    def choose(seed: int, prompt: int) -> int:
        return sample(logits, requests([Sampling(max_tokens=1, seed=seed)], prompt))[0][0]

    assert choose(1, 5) == choose(1, 5)
    assert len({choose(1, n) for n in range(50)}) > 45
    assert len({choose(seed, 5) for seed in range(50)}) > 45


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.randn(5, 100) * 50
    tokens, _ = sample(logits, requests([Sampling(max_tokens=1, temperature=t, seed=s) for s, t in enumerate((1e-30,) * 4 + (1e-50,))]))
    assert tokens == logits.argmax(1).tolist()


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.zeros(2, 10)
    logits[:, 3] = 9
    logits[:, 7] = 5
    early, done = requests([Sampling(max_tokens=9, temperature=0, min_tokens=2, logprobs=0)] * 2)
    early.stop_tokens = done.stop_tokens = frozenset({3})
    done.tokens.extend([1, 1])
    tokens, logprobs = sample(logits, [early, done])
    assert tokens == [7, 3]
    assert logprobs[0][0].chosen == pytest.approx(logits[0].log_softmax(0)[7].item())


@pytest.mark.parametrize(
    ("sampling", "stop_tokens"),
    [
        (Sampling(max_tokens=1, temperature=1e-50), ()),
        (Sampling(max_tokens=1, top_k=2**63, top_p=0.9), ()),
        (Sampling(max_tokens=1, temperature=0, min_tokens=3), (100, 4_000_000_000)),
        (Sampling(max_tokens=1, min_tokens=3), range(100)),
    ],
    ids=["temperature", "top_k", "stop tokens outside", "all tokens forbidden"],
)
def test_no_sampling_can_fail_the_step_or_leave_the_vocabulary(sampling: Sampling, stop_tokens: Sequence[int]) -> None:
    (request,) = requests([sampling])
    request.stop_tokens = frozenset(stop_tokens)
    (token,), _ = sample(torch.randn(1, 100), [request])
    assert token in range(100)


def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary() -> None:
    (token,), _ = sample(torch.full((1, 100), float("nan")), requests([Sampling(max_tokens=1)]))
    assert token in range(100)


def test_logprobs_are_the_models_own() -> None:
    torch.manual_seed(3)
    logits = torch.randn(3, 50)
    want = logits.log_softmax(1)
    samplings = [
        GREEDY,
        Sampling(max_tokens=1, temperature=0.2, top_k=2, logprobs=4),
        Sampling(max_tokens=1, temperature=0, logprobs=0),
    ]
    tokens, logprobs = sample(logits, requests(samplings))
    assert logprobs[0] == ()
    ((drawn,), (greedy,)) = logprobs[1:]
    assert drawn.chosen == pytest.approx(want[1, tokens[1]].item())
    top = want[1].topk(4)
    assert drawn.top_ids == tuple(top.indices.tolist())
    assert drawn.top_logprobs == pytest.approx(top.values.tolist())
    assert greedy.chosen == pytest.approx(want[2].max().item())
    assert greedy.top_ids == ()


def test_noise_is_uniform_and_fixed_for_ever() -> None:
    numbers = uniform([seed for seed in range(100) for _ in range(100)], [p for _ in range(100) for p in range(100)])
    assert numbers.min() >= 0 and numbers.max() < 1
    np.testing.assert_allclose(np.histogram(numbers, 10)[0], 1000, atol=120)
    np.testing.assert_array_equal(uniform([-1, 2**64 - 1], [3, 3])[0], uniform([2**64 - 1], [3])[0])
    # Written down: a seed must give the same text after an upgrade.
    np.testing.assert_array_equal(uniform([0, 42, -7], [1, 1000, 123456]), [0.6524484863740322, 0.09832583850150012, 0.9105670875182851])
