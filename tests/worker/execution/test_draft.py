"""The draft model: its KV catches up after skipped steps, and a model that drafts for itself is always right."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from tests.models import save_model
from tests.worker.execution.planner import Planner, make_request
from tests.worker.sampling.test_verify import run

from fairlead_worker.execution import draft as draft_module
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.scheduler.plan import Row


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    return load_model(str(folder))


class Asking(Planner):
    """Requests a number of drafts for each request, step by step."""

    wanted = (3, 0, 0, 5, 1, 0, 2)

    def plan(self):
        self.steps = getattr(self, "steps", -1) + 1
        plan = super().plan()
        rows = list(plan.rows)
        for place, row in enumerate(plan.rows):
            left = row.request.sampling.max_tokens - row.request.output_length - 1
            count = min(left, self.wanted[(self.steps + int(row.request.id)) % len(self.wanted)])
            if row.request.output_length and count:
                rows[place] = row.with_draft(count)
        return replace(plan, rows=rows, drafted=sum(row.num_drafts for row in rows))


@pytest.mark.parametrize("catch_up", [4, 512])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 30])
def test_a_model_that_drafts_for_itself_is_always_right(
    loaded: LoadedModel, chunk: int, catch_up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a wrong draft reveals wrong or missing draft KV."""
    monkeypatch.setattr(draft_module, "CATCH_UP", catch_up)

    def requests():
        return [
            make_request(str(i), [(i * 37 + j * 11) % 500 + 2 for j in range(n)], Sampling(max_tokens=40, temperature=0))
            for i, n in enumerate((1, 5, 16, 40))
        ]

    plain, _, _ = run(RunnerBuilder(loaded=loaded, page_size=8, kv_pages=60).build(), Planner(requests(), 60, 8, chunk))
    runner = RunnerBuilder(loaded=loaded, page_size=8, kv_pages=60, draft=loaded).build()
    planner = Asking(requests(), 60, 8, chunk)
    guessed = 0
    execute = runner.execute

    def watched(plan):
        nonlocal guessed
        result = execute(plan)
        plan = result.executed
        assert plan.drafted == sum(len(row.draft) for row in plan.rows), "a row that catches up has no drafts and counts for none"
        sampled = [row for row in plan.rows if row.samples]
        for row, tokens in zip(sampled, result.tokens, strict=True):
            assert len(tokens) == 1 + len(row.draft), "a guess was wrong"
            guessed += len(row.draft)
        return result

    runner.execute = watched  # type: ignore[method-assign]  # looks at each step
    assert run(runner, planner)[0] == plain
    assert guessed > 40


def test_a_step_catches_up_on_a_bounded_number_of_tokens(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests without draft KV for their output need one large pass otherwise, which no memory profile includes."""
    monkeypatch.setattr(draft_module, "CATCH_UP", 6)
    runner = RunnerBuilder(loaded=loaded, page_size=8, kv_pages=60, draft=loaded).build()
    drafter = runner.drafter
    assert drafter is not None
    passes: list[int] = []
    choose = drafter._choose

    def record(rows: list[Row], drafted: torch.Tensor | None = None) -> torch.Tensor:
        passes.append(sum(row.count for row in rows))
        return choose(rows, drafted)

    drafter._choose = record  # type: ignore[method-assign]  # counts tokens

    class Late(Asking):
        """Requests no draft before each request has 20 tokens of output."""

        def plan(self):
            plan = super().plan()
            late = self.steps >= 20
            return plan if late else replace(plan, rows=[row.with_draft(0) if row.num_drafts else row for row in plan.rows], drafted=0)

    requests = [make_request(str(i), [i + 2, 7, 9], Sampling(max_tokens=40, temperature=0)) for i in range(5)]
    run(runner, Late(requests, 60, 8))
    prompts, *later = passes
    assert prompts == 5 * 3
    assert 5 < max(later) <= 5 + 6


def test_its_kv_has_as_many_pages_out_of_the_same_memory(loaded: LoadedModel) -> None:
    page_bytes = 2 * 2 * (16 + 16) * 16 * 4
    runner = RunnerBuilder(loaded=loaded, page_size=16, kv_cache_bytes=page_bytes * 10, draft=loaded).build()
    assert runner.backend.pages == 5
    assert runner.drafter is not None and runner.drafter._backend.pages == 5


def test_tokens_of_one_vocabulary_alone_do_no_harm(loaded: LoadedModel, tmp_path: Path) -> None:
    """The same tokenizer, and embeddings padded differently."""
    for size in (400, 600):
        save_model("llama", tmp_path / str(size), vocab_size=size)
        runner = RunnerBuilder(loaded=loaded, page_size=8, kv_pages=60, draft=load_model(str(tmp_path / str(size)))).build()
        request = make_request("0", [500, 511, 450, 3], Sampling(max_tokens=20, temperature=0))
        tokens, _, _ = run(runner, Asking([request], 60, 8))
        again = make_request("0", [500, 511, 450, 3], Sampling(max_tokens=20, temperature=0))
        assert tokens == run(RunnerBuilder(loaded=loaded, page_size=8, kv_pages=60).build(), Planner([again], 60, 8))[0]
