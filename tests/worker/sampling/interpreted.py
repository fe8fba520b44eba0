"""The kernel that samples, in Triton's interpreter on the CPU, beside a sort and the steps of `sampler.choose`.

A program of its own (`TRITON_INTERPRET=1 python -m tests.worker.sampling.interpreted`), because Triton decides at its import whether to
interpret. Prints each case, and ends with 1 if a token is wrong.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from bench.gpu import interpreter
from tests.worker.execution.planner import make_request
from tests.worker.sampling.test_sampler import requests

from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.sampling.filters import keep_sorted
from fairlead_worker.sampling.fused import FusedSampler
from fairlead_worker.sampling.kernel import launch
from fairlead_worker.sampling.masks import Masks
from fairlead_worker.sampling.noise import uniform
from fairlead_worker.sampling.sampler import sample
from fairlead_worker.scheduler.request import Request

SMALL = FusedSampler(partial(launch, rows=4, guess=8))
"""Tiles of 1,024 tokens, so that a vocabulary has several, and a guess for every top_p with more than a few candidates."""
FILTERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 1e-50},
    {"top_k": 1},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 1500, "top_p": 0.95},
    {"top_p": 1e-50},
    {"top_p": 0.3},
    {"top_p": 0.97, "temperature": 3.0, "min_p": 0.02},
    {"top_p": 0.999999},
    {"min_p": 0.05},
]
EDITS: list[dict[str, Any]] = [
    {"temperature": 0, "logit_bias": ((3, 40.0), (7, -100.0)), "repetition_penalty": 9.0},
    {"logit_bias": ((2, 5.0), (699, 6.0)), "repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": -0.5, "top_p": 0.9},
    {"allowed_token_ids": (1, 300, 699), "bad_words": ((300,),)},
    {"allowed_token_ids": (5, 6), "bad_words": ((5,), (6,)), "logit_bias": ((5, 3.0),), "temperature": 0},
    {"min_tokens": 9, "top_k": 3},
    {"bad_words": tuple((token,) for token in range(600)), "top_p": 0.5},
]
NOISE_ERROR = 1e-6
"""Between two tokens: weights of float32 against those of float64."""


def wrong_draws(tokens: Sequence[int], logits: torch.Tensor, samplings: Sequence[Sampling]) -> int:
    """Count tokens that the noise does not hit in the cumulative distribution of what a stable sort leaves."""
    noise = uniform([each.seed for each in samplings], [5] * len(samplings))
    wrong = 0
    for token, row, sampling, number in zip(tokens, logits.float(), samplings, noise, strict=True):
        if sampling.temperature == 0:
            wrong += token != int(row.argmax())
            continue
        scaled = (row - row.max())[None] / max(sampling.temperature, torch.finfo(torch.float32).tiny)
        left = keep_sorted(scaled, [sampling])[0].softmax(0, dtype=torch.float64)
        upper, share = float(left.cumsum(0)[token]), float(left[token])
        wrong += not (share > 0 and upper - share - NOISE_ERROR <= number <= upper + NOISE_ERROR)
    return wrong


def filtered() -> Iterator[tuple[str, int]]:
    generator = torch.Generator().manual_seed(1)
    for vocabulary, equal, dtype in ((2500, 0.0, torch.float32), (2500, 0.5, torch.bfloat16), (700, 2.0, torch.float16)):
        logits = torch.randn(len(FILTERS), vocabulary, generator=generator) * 2
        logits = ((logits / equal).round() * equal if equal else logits).to(dtype)
        samplings = [Sampling(max_tokens=1, seed=seed, **setting) for seed, setting in enumerate(FILTERS)]
        before = logits.clone()
        tokens, _ = sample(logits, requests(samplings), fused=SMALL)
        yield f"filters, {vocabulary} tokens, {dtype}", wrong_draws(tokens, logits, samplings)
        if equal:
            order = torch.arange(len(FILTERS) - 1, 3, -1)  # other neighbours, and another place
            alone, _ = sample(logits[order], requests([samplings[row] for row in order]), fused=SMALL)
            yield f"in another batch, {dtype}", sum(token != tokens[row] for token, row in zip(alone, order.tolist(), strict=True))
        yield f"changed logits, {dtype}", int((logits != before).sum())


def guessed() -> Iterator[tuple[str, int]]:
    """Guesses from a sample that misses the likeliest tokens, above or below the threshold, so that another pass is needed."""
    vocabulary, step = 9000, 9000 // 256
    unseen = [place for place in range(vocabulary) if place % step >= 16]
    for name, value in (("above", 6.0), ("below", -0.5)):
        logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(2)) * 0.3
        logits[:, unseen[::3]] += value
        samplings = [Sampling(max_tokens=1, seed=seed, top_p=0.6) for seed in range(3)]
        yield f"a wrong guess {name}", wrong_draws(sample(logits, requests(samplings), fused=SMALL)[0], logits, samplings)


def edited() -> Iterator[tuple[str, int]]:
    """Biases, penalties, stop tokens, bad words and masks, with drafts: the choice of `bench.gpu.interpreter`."""

    def rows() -> list[Request]:
        made = [make_request(str(row), [7, 3, 7, 699], Sampling(max_tokens=20, seed=row, **each)) for row, each in enumerate(EDITS * 2)]
        for request in made:
            request.tokens.extend([3, 3, 2])
            request.stop_tokens = frozenset({0, 4, 9})
        return made

    logits = torch.randn(len(EDITS) * 2, 700, generator=torch.Generator().manual_seed(3)) * 3
    logits[4::6, [0, 4, 9]] = 50.0
    words = np.random.default_rng(4).integers(0, 2**32, (3, 21), dtype=np.uint32)
    words[2] = 0
    for dtype in (torch.float32, torch.bfloat16):
        ahead = [()] * len(EDITS) + [(3, 5)] * len(EDITS)
        given, here, there = logits.to(dtype), Masks([1, 6, 10], words), Masks([1, 6, 10], words)
        before = given.clone()
        want, _ = sample(given, rows(), ahead, here, FusedSampler(interpreter.choose_tokens))
        got, _ = sample(given, rows(), ahead, there, SMALL)
        yield f"edits, {dtype}", sum(one != other for row, (one, other) in enumerate(zip(got, want, strict=True)) if row != 10)
        yield f"empty masks, {dtype}", int(here.dead != there.dead or here.dead != {10})
        yield f"changed logits, {dtype}", int((given != before).sum())


def strange() -> Iterator[tuple[str, int]]:
    """Rows of NaN and of forbidden tokens give a token of the vocabulary."""
    settings = [{"temperature": 0}, {}, {"top_k": 5, "top_p": 0.5}, {"top_p": 0.9, "min_p": 0.1}]
    for number in (float("nan"), float("-inf")):
        tokens, _ = sample(torch.full((4, 700), number), requests([Sampling(max_tokens=1, **each) for each in settings]), fused=SMALL)
        yield f"logits of {number}", sum(token not in range(700) for token in tokens)


def main() -> int:
    total = 0
    for cases in (filtered, guessed, edited, strange):
        for name, wrong in cases():
            print(f"{name}: {wrong} wrong", flush=True)
            total += wrong
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
