"""Penalties, bias and allowed tokens: equal to a plain computation, step after step, in any batch."""

import random
from array import array
from typing import Any

import torch
from tests.worker.execution.planner import make_request
from transformers import RepetitionPenaltyLogitsProcessor

from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.sampling.penalties import adjust
from fairlead_worker.sampling.sampler import sample
from fairlead_worker.sampling.token_arrays import token_array
from fairlead_worker.scheduler.request import Request

VOCABULARY = 300
SETTINGS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 0.7},
    {"frequency_penalty": 1.3},
    {"frequency_penalty": -0.4, "presence_penalty": 0.2},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "frequency_penalty": 0.5},
    {"logit_bias": ((3, 4.5), (7, -100.0))},
    {"logit_bias": ((5, 9.0),), "repetition_penalty": 2.0, "presence_penalty": 1.0},
    {"allowed_token_ids": (9, 4, 250)},
    {"allowed_token_ids": (9, 4), "logit_bias": ((4, 50.0),), "frequency_penalty": 2.0},
]


def slowly(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """One row, one token at a time, from all tokens of the request."""
    s, row = request.sampling, logits.clone()
    output = list(request.tokens[request.prompt_length :])
    for token, value in s.logit_bias:
        row[token] += value
    for token in set(request.tokens):
        row[token] = row[token] / s.repetition_penalty if row[token] > 0 else row[token] * s.repetition_penalty
        row[token] -= torch.tensor(s.frequency_penalty) * output.count(token)
        row[token] -= torch.tensor(s.presence_penalty) * (token in output)
    if s.allowed_token_ids:
        for token in set(range(len(row))) - set(s.allowed_token_ids):
            row[token] = float("-inf")
    return row


def requests(seed: int = 0) -> list[Request]:
    chooser = random.Random(seed)
    return [
        make_request(str(i), chooser.choices(range(VOCABULARY), k=chooser.randrange(1, 200)), Sampling(max_tokens=999, **setting))
        for i, setting in enumerate(SETTINGS)
    ]


def test_every_step_is_what_a_plain_computation_gives() -> None:
    torch.manual_seed(4)
    chooser, rows = random.Random(5), requests()
    for step in range(50):
        logits = torch.randn(len(rows), VOCABULARY) * 4
        want = torch.stack([slowly(row, request) for row, request in zip(logits, rows, strict=True)])
        torch.testing.assert_close(adjust(logits, rows), want, rtol=0, atol=0, msg=f"step {step}")
        for request in rows:
            request.tokens.extend(chooser.choices(range(VOCABULARY), k=chooser.choice((1, 1, 1, 3))))
        chooser.shuffle(rows)


def test_repetition_is_transformers_own() -> None:
    torch.manual_seed(6)
    logits = torch.randn(1, VOCABULARY) * 3
    request = make_request("a", [5, 9, 9, 200], Sampling(max_tokens=9, repetition_penalty=1.3))
    request.tokens.extend([7, 5])
    want = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([list(request.tokens)]), logits.clone())
    torch.testing.assert_close(adjust(logits, [request]), want)


def test_the_models_logits_stay_as_they_are() -> None:
    logits = torch.randn(len(SETTINGS), VOCABULARY)
    before = logits.clone()
    adjust(logits, requests())
    assert torch.equal(logits, before)


def test_a_step_looks_at_new_tokens_only() -> None:
    request = make_request("a", range(50), Sampling(max_tokens=9, presence_penalty=1.0))
    adjust(torch.zeros(1, 100), [request])
    looked: list[int] = []

    class Watched(array):  # type: ignore[type-arg]  # array('I')
        def __getitem__(self, place: object) -> object:
            looked.append(len(range(*place.indices(len(self)))) if isinstance(place, slice) else 1)
            return super().__getitem__(place)  # type: ignore[index]  # as array takes it

    request.sampler_state["history"].tokens = Watched("I", [*range(50), 7])
    adjust(torch.zeros(1, 100), [request])
    assert looked == [1]


def test_tokens_do_not_depend_on_company() -> None:
    torch.manual_seed(7)
    logits = torch.randn(len(SETTINGS), VOCABULARY)
    rows = requests()
    together, _ = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0][0] for i, row in enumerate(rows)]
    assert together == alone


def test_stop_tokens_outside_the_vocabulary_harm_nobody() -> None:
    request = make_request("a", [1], Sampling(max_tokens=9, temperature=0, min_tokens=5, logit_bias=((4_000_000_000, 1.0),)))
    request.stop_tokens = frozenset({4_000_000_000})
    assert sample(torch.eye(1, 10), [request])[0] == [0]


def test_tokens_that_a_request_names_are_read_once() -> None:
    """A thousand of them for each of 128 choices took 0.16 s of every step."""
    named = tuple(range(5, 20))
    sampling = Sampling(max_tokens=9, logit_bias=((3, 1.5), (99, 2.0)), allowed_token_ids=named, bad_words=((4,), (98,)))
    request = make_request("r", [1, 2], sampling)
    stops = token_array(request, "stops", iter((1, 2, 77)), 32)
    assert stops.tolist() == [1, 2] and token_array(request, "stops", iter(()), 32) is stops
    first = adjust(torch.zeros(1, 32), [request])
    kept = {name: id(arrays) for name, arrays in request.sampler_state.items()}
    assert torch.equal(first, adjust(torch.zeros(1, 32), [request]))
    assert {name: id(arrays) for name, arrays in request.sampler_state.items()} == kept and {"bias", "allowed"} <= kept.keys()
