"""Sampling: greedy is exact, filters equal transformers' own, and a row's choice does not depend on other rows."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests.worker.execution.planner import make_request
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.sampling.blocks import largest
from fairlead_worker.sampling.draw import _search, draw
from fairlead_worker.sampling.filters import NARROW, WIDE, drop_unlikely, keep_among, keep_sorted, widths
from fairlead_worker.sampling.noise import uniform
from fairlead_worker.sampling.penalties import adjust
from fairlead_worker.sampling.sampler import sample
from fairlead_worker.scheduler.request import Request

GREEDY = Sampling(max_tokens=1, temperature=0)


def requests(samplings: Sequence[Sampling], prompt: int = 5) -> list[Request]:
    return [make_request(str(i), range(prompt), sampling) for i, sampling in enumerate(samplings)]


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
    {"top_k": 2000},
    {"top_k": 2000, "top_p": 0.9, "min_p": 0.001},
    {"top_k": 800, "top_p": 0.99},
    {"top_p": 0.9, "min_p": 0.02},
    {"top_p": 0.999999},
]


def filtered(scaled: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """What is left of each row, the dropped tokens at -inf: by the way that `draw` takes for it."""
    rows, left = widths(samplings, scaled.shape[1]), torch.full_like(scaled, float("nan"))
    for some, width in ((rows.narrow, NARROW), (rows.wide, WIDE)):
        if some:
            kept, ids, enough = keep_among(scaled[some], [samplings[i] for i in some], width)
            for i, values, tokens, fits in zip(some, kept, ids, enough, strict=True):
                left[i] = torch.full_like(left[i], float("-inf")).scatter_(0, tokens, values)
                rows.sorted.extend([] if fits else [i])
    for some, by in ((rows.whole, drop_unlikely), (rows.sorted, keep_sorted)):
        if some:
            left[some] = by(scaled[some], [samplings[i] for i in some])
    return left


@pytest.mark.parametrize("scale", [0.5, 3.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("vocabulary", [500, 5000])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_filters_keep_what_transformers_keeps(setting: dict[str, float], vocabulary: int, scale: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(8, vocabulary) * scale
    logits -= logits.amax(1, keepdim=True)
    sampling = Sampling(max_tokens=1, **setting)  # type: ignore[arg-type]  # top_k is an int in every setting
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    want = warpers(torch.zeros(8, 1, dtype=torch.int64), logits.clone())
    got = filtered(logits / sampling.temperature, [sampling] * 8)
    # top_p may end one token earlier or later, where the sums of float32 (theirs) and of float64 round differently.
    different = got.isinf() != want.isinf()
    assert different.sum() <= (1 if sampling.top_p < 1 else 0)
    torch.testing.assert_close(got[~different], want[~different])


def test_a_row_is_sorted_whole_only_where_its_top_p_needs_it() -> None:
    peaked, flat = torch.randn(1, 5000) * 4, torch.randn(1, 5000) * 0.1
    scaled = torch.cat([peaked, flat])
    scaled -= scaled.amax(1, keepdim=True)
    *_, enough = keep_among(scaled, [Sampling(max_tokens=1, top_p=0.9)] * 2, WIDE)
    assert enough.tolist() == [True, False]


@pytest.mark.parametrize("vocabulary", [700, 5003])
def test_a_row_chooses_the_same_alone_and_in_any_company(vocabulary: int) -> None:
    torch.manual_seed(2)
    logits = torch.randn(len(SETTINGS) + 1, vocabulary) * 2
    samplings = [Sampling(max_tokens=1, seed=i, **setting) for i, setting in enumerate(SETTINGS)] + [GREEDY]  # type: ignore[arg-type]  # as above
    together, _ = sample(logits, requests(samplings))
    backwards, _ = sample(logits.flip(0), requests(samplings[::-1]))
    alone = [sample(logits[i : i + 1], requests([s]))[0][0] for i, s in enumerate(samplings)]
    assert together == backwards[::-1] == alone


@pytest.mark.parametrize(
    "setting",
    [{}, {"top_k": 40}, {"top_p": 0.7}, {"top_p": 0.95, "temperature": 2.0}, {"min_p": 0.2}, {"top_k": 1500, "top_p": 0.8}],
    ids=str,
)
def test_draws_follow_the_distribution_over_many_blocks(setting: dict[str, float]) -> None:
    """A vocabulary of several blocks and a part of one, against the probabilities that the filters leave."""
    torch.manual_seed(4)
    sampling = Sampling(max_tokens=1, **setting)  # type: ignore[arg-type]  # as above
    logits, count = torch.randn(1, 1800) * 2, 10_000
    noise = torch.from_numpy(uniform(range(count), [7] * count))
    tokens = torch.cat([draw(logits.expand(len(some), -1), [sampling] * len(some), some) for some in noise.split(2000)])
    scaled = (logits - logits.amax()) / sampling.temperature
    want = filtered(scaled, [sampling]).softmax(1, dtype=torch.float64)[0]
    frequency = torch.bincount(tokens, minlength=1800) / count
    assert frequency[want == 0].sum() == 0
    # Sums over stretches of the vocabulary, within four standard deviations.
    got, expected = (each.double().split(100) for each in (frequency, want))
    for one, other in zip(got, expected, strict=True):
        share = other.sum().item()
        assert abs(one.sum().item() - share) <= 4 * (share * (1 - share) / count) ** 0.5 + 1e-9


def test_draws_invert_the_cumulative_distribution() -> None:
    """The same token as the plain computation in float64 gives, but where the noise is within rounding of a boundary."""
    torch.manual_seed(5)
    logits, noise = torch.randn(64, 30_000) * 2, torch.rand(64, dtype=torch.float64)
    cumulative = logits.softmax(1, dtype=torch.float64).cumsum(1)
    tokens = _search(logits, noise)
    upper = cumulative.gather(1, tokens[:, None])[:, 0]
    lower = upper - logits.softmax(1, dtype=torch.float64).gather(1, tokens[:, None])[:, 0]
    assert ((lower - 1e-6 <= noise) & (noise <= upper + 1e-6)).all()


@pytest.mark.parametrize("share", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("vocabulary", [512, 513, 1024, 1300])
def test_the_ends_of_the_noise_hit_tokens_that_can_come(vocabulary: int, share: float) -> None:
    logits = torch.full((3, vocabulary), float("-inf"))
    for row, (first, last) in enumerate(((0, vocabulary - 1), (5, 300), (511, 511))):
        logits[row, [first, last]] = 1.0
    tokens = draw(logits, [Sampling(max_tokens=1)] * 3, torch.full((3,), share, dtype=torch.float64))
    assert tokens.tolist() == ([0, 5, 511] if share == 0 else [vocabulary - 1, 300, 511])


def test_greedy_rows_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 a copy in float32 is the dearest thing in the step of a large vocabulary."""
    logits = torch.randn(4, 1000).bfloat16()
    monkeypatch.setattr(torch.Tensor, "float", lambda self: pytest.fail("copied"))
    assert sample(logits, requests([GREEDY] * 4))[0] == logits.argmax(1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 100, 512, 513, 5000, 151_936])
def test_the_largest_is_argmax_and_the_first_of_equals(vocabulary: int, dtype: torch.dtype) -> None:
    logits = torch.randn(6, vocabulary).to(dtype)
    logits[1] = 2.0
    logits[2] = float("-inf")
    logits[3, -1] = logits[3, vocabulary // 2] = 9.0
    assert largest(logits).tolist() == logits.float().argmax(1).tolist()
    assert [largest(logits[i : i + 1]).item() for i in range(6)] == largest(logits).tolist()
    logits[4], logits[5, 0] = float("nan"), float("nan")
    assert largest(logits)[:4].tolist() == logits[:4].float().argmax(1).tolist()
    assert largest(logits).min() >= 0 and largest(logits).max() < vocabulary


def test_the_largest_without_the_native_library_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(20, 5000).round(decimals=1)
    native = largest(logits)
    monkeypatch.setattr("fairlead_worker.sampling.blocks.native", lambda: None)
    assert largest(logits).tolist() == native.tolist()


def test_a_greedy_row_takes_the_same_token_beside_others_in_bfloat16() -> None:
    torch.manual_seed(6)
    logits = torch.randn(30, 2000).bfloat16()
    others = [Sampling(max_tokens=1, temperature=0, logprobs=1), Sampling(max_tokens=1, seed=3), GREEDY]
    samplings = [others[i % 3] for i in range(30)]
    together, _ = sample(logits, requests(samplings))
    assert together == [sample(logits[i : i + 1], requests([s]))[0][0] for i, s in enumerate(samplings)]
    assert [t for i, t in enumerate(together) if i % 3 != 1] == [t for i, t in enumerate(logits.argmax(1).tolist()) if i % 3 != 1]


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


@pytest.mark.parametrize("written", [0, 1, 3, 4])
def test_min_tokens_is_transformers_own(written: int) -> None:
    logits = torch.randn(1, 50)
    logits[0, [3, 9]] = 20.0
    (request,) = requests([Sampling(max_tokens=9, temperature=0, min_tokens=3)])
    request.stop_tokens = frozenset({3, 9})
    request.tokens.extend([1] * written)
    processor = MinNewTokensLengthLogitsProcessor(request.prompt_length, 3, [3, 9], device="cpu")
    want = processor(torch.tensor([request.tokens.tolist()]), logits.clone())
    assert sample(logits, [request])[0] == want.argmax(1).tolist()


def test_logit_bias_is_transformers_own() -> None:
    logits = torch.randn(6, 50)
    bias = ((3, 4.0), (7, -100.0), (11, 2.5))
    processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias])
    want = processor(torch.zeros(6, 1, dtype=torch.int64), logits.clone())
    got = adjust(logits, requests([Sampling(max_tokens=1, logit_bias=bias)] * 6))
    torch.testing.assert_close(got, want)


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
