"""Verified tokens equal those of plain steps: greedy and sampled, penalized, with any draft, and with the model's distribution."""

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tests.models import save_model
from tests.worker.execution.planner import Planner, make_request

from fairlead_worker.execution.pack import pack
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.ipc.messages import Sampling, ThinkingBudget, TokenLogprobs
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.sampling.penalties import adjust
from fairlead_worker.sampling.sampler import sample
from fairlead_worker.sampling.verify import count_accepted, verify
from fairlead_worker.scheduler.plan import Row, StepPlan
from fairlead_worker.scheduler.request import Request

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.3, "seed": 4, "top_p": 0.9, "top_k": 30},
    {"temperature": 1.0, "seed": 5, "min_p": 0.05, "logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 1.5, "logprobs": 0},
    {"temperature": 0.9, "seed": 6, "repetition_penalty": 1.4, "presence_penalty": 0.6},
    {"temperature": 0.0, "allowed_token_ids": (10, 11, 12), "min_tokens": 9, "frequency_penalty": 0.3},
    {"temperature": 0.9, "seed": 8, "thinking": ThinkingBudget(7, (2,), (9, 7, 9), used=0), "logprobs": 1},
    {"temperature": 0.7, "seed": 7, "logit_bias": ((20, 6.0), (21, 6.0)), "min_tokens": 12},
]
TOKENS = 30


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(request.param, folder)
    return load_model(str(folder))


def test_how_far_a_draft_is_accepted() -> None:
    assert [count_accepted([1, 2, 3], chosen) for chosen in ([9, 2, 3, 4], [1, 2, 9, 4], [1, 2, 3, 9, 7])] == [0, 2, 3]
    assert count_accepted([], [5]) == 0


def test_a_speculating_row_is_packed_as_rows_of_one_token() -> None:
    chunk, whole = make_request("a", [10, 11, 12], Sampling(1)), make_request("b", [20, 21, 22], Sampling(9))
    rows = [Row(whole, 2, 3, array("i", [7, 2, 9]), True, draft=[30, 31]), Row(chunk, 1, 2, array("i", [4, 5]), True)]
    step = pack(StepPlan(rows, drafted=2), 2, torch.device("cpu"))
    assert step.tokens.tolist() == [22, 30, 31, 11, 12]
    assert step.positions.tolist() == [2, 3, 4, 1, 2]
    assert step.slots.tolist() == [4, 5, 18, 9, 10]
    assert (list(step.starts), list(step.counts)) == ([2, 3, 4, 1], [1, 1, 1, 2])
    assert [table.tolist() for table in step.tables()] == [[7, 2], [7, 2], [7, 2, 9], [4, 5]]
    assert step.sampling.tolist() == [0, 1, 2, 4]


class Guesser(Planner):
    """Guesses with the answers at hand: right up to a random place, then wrong."""

    def __init__(self, requests: list[Request], answers: Sequence[Sequence[int]], **settings: int) -> None:
        super().__init__(requests, **settings)
        self.answers = {request.id: answer for request, answer in zip(requests, answers, strict=True)}
        self.draw = random.Random(8)

    def plan(self) -> StepPlan:
        plan = super().plan()
        rows = list(plan.rows)
        for at, row in enumerate(plan.rows):
            if row.request.output_length:
                left = row.request.sampling.max_tokens - row.request.output_length - 1
                right = self.answers[row.request.id][row.request.output_length :][: min(left, self.draw.choice([0, 1, 4, 7]))]
                place = self.draw.randrange(2 * len(right) + 1)
                draft = [token if i < place else self.draw.randrange(512) for i, token in enumerate(right)]
                rows[at] = row.with_draft(len(draft), draft)
        return replace(plan, rows=rows, drafted=sum(len(row.draft) for row in rows))


def run(runner: ModelRunner, planner: Planner) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprobs]], int]:
    told: dict[str, list[TokenLogprobs]] = {request.id: [] for request in planner.requests}
    count = 0
    while plan := planner.plan():
        result = runner.execute(plan)
        count += 1
        sampled = [row for row in plan.rows if row.samples]
        for row in plan.rows:
            row.request.computed = row.end
        for row, tokens, logprobs in zip(sampled, result.tokens, result.logprobs or [()] * len(sampled), strict=True):
            row.request.tokens.extend(tokens)
            row.request.computed = len(row.request.tokens) - 1
            told[row.request.id] += logprobs
    return {r.id: r.tokens[r.prompt_length :].tolist() for r in planner.requests}, told, count


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 1 << 30), (8, 7), (64, 16)])
def test_tokens_and_logprobs_are_those_of_plain_steps(loaded: LoadedModel, backend: str, page_size: int, chunk: int) -> None:
    def requests() -> list[Request]:
        made = [
            make_request(str(i), [(i * 31 + j * 7) % 500 + 2 for j in range(9 + 13 * i)], Sampling(max_tokens=TOKENS, **settings))
            for i, settings in enumerate(SETTINGS)
        ]
        for request in made:
            request.stop_tokens = frozenset({20, 11})
        return made

    pages = 3000 // page_size
    plain, plain_told, plain_steps = run(
        RunnerBuilder(loaded=loaded, page_size=page_size, kv_pages=pages, backend=backend).build(),
        Planner(requests(), pages, page_size, chunk),
    )
    guesser = Guesser(requests(), list(plain.values()), pages=pages, page_size=page_size, chunk=chunk)
    tokens, told, steps = run(RunnerBuilder(loaded=loaded, page_size=page_size, kv_pages=pages, backend=backend).build(), guesser)
    assert tokens == plain
    assert all(len(answer) == TOKENS for answer in tokens.values())
    assert steps < plain_steps
    for name, expected in plain_told.items():
        assert [each.top_ids for each in told[name]] == [each.top_ids for each in expected]
        assert [each.chosen for each in told[name]] == pytest.approx([each.chosen for each in expected], abs=1e-4)


def test_bfloat16_has_the_same_bits_with_drafts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where two tokens are equally likely in bfloat16, other bits would be another text."""
    folder = tmp_path_factory.mktemp("bf16")
    save_model("llama", folder)
    runner = RunnerBuilder(loaded=load_model(str(folder), dtype="bfloat16"), page_size=4, kv_pages=40, backend="cpu").build()
    request = make_request("a", range(2, 40), Sampling(max_tokens=99))
    pages = array("i", range(20))
    runner.logits(StepPlan([Row(request, 0, 38, pages, False)]))
    request.tokens.extend([5, 6, 7, 8])
    plain = torch.cat(
        [
            runner.logits(StepPlan([Row(make_request("a", request.tokens[: at + 1], request.sampling), at, 1, pages, True)]))
            for at in range(38, 42)
        ]
    )
    row = Row(make_request("a", request.tokens[:39], request.sampling), 38, 4, pages, True, draft=[6, 7, 8])
    assert torch.equal(runner.logits(StepPlan([row], drafted=3)), plain)


def test_positions_of_a_penalized_request_count_the_draft_before_them() -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, 50)
    request = make_request("a", [1, 2, 3], Sampling(max_tokens=9, temperature=0, frequency_penalty=0.7, repetition_penalty=1.3))
    request.tokens.extend([4, 4])
    draft = [4, 9, 9]
    together = adjust(logits, [request] * 4, [draft[:place] for place in range(4)])
    for place in range(4):
        later = make_request("b", [1, 2, 3], request.sampling)
        later.tokens.extend([4, 4, *draft[:place]])
        assert torch.equal(together[place], adjust(logits[place : place + 1], [later])[0])
    assert torch.equal(adjust(logits[:1], [request])[0], together[0]), "a rejected draft leaves no trace"


def test_sampled_tokens_are_distributed_as_the_model_says() -> None:
    """A draft of two tokens, verified under 40,000 seeds: chi-square against the probabilities, each token given those before it."""
    vocabulary, draft, trials = 6, [2, 4], 40_000
    torch.manual_seed(3)
    logits = torch.randn(3, vocabulary)
    probabilities = (logits / 0.8).softmax(1)
    counts = [torch.zeros(vocabulary) for _ in range(3)]
    for batch in range(0, trials, 1000):
        rows = [
            Row(make_request(str(seed), [1], Sampling(max_tokens=9, temperature=0.8, seed=seed)), 0, 3, [0], True, draft=draft)
            for seed in range(batch, batch + 1000)
        ]
        tokens, _ = verify(logits.repeat(1000, 1), rows)
        for row in tokens:
            for place, token in enumerate(row):
                counts[place][token] += 1
    assert counts[1].sum() == counts[0][2] and counts[2].sum() == counts[1][4]
    for seen, expected in zip(counts, probabilities, strict=True):
        assert seen.sum() > 100
        chi_square = ((seen - expected * seen.sum()) ** 2 / (expected * seen.sum())).sum().item()
        assert chi_square < 20.5  # 5 degrees of freedom: one sample in a thousand is above


def test_a_verified_token_is_the_plain_one_for_every_seed() -> None:
    torch.manual_seed(4)
    logits, draft = torch.randn(3, 6), [2, 4]
    for seed in range(500):
        request = make_request("a", [1], Sampling(max_tokens=9, temperature=1.1, top_p=0.9, seed=seed))
        (tokens,), _ = verify(logits, [Row(request, 0, 3, [0], True, draft=draft)])
        for place, token in enumerate(tokens):
            assert sample(logits[place : place + 1], [request])[0] == [token]
            request.tokens.append(token)
