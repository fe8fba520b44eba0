"""The runner: packing, storage sizes, and steps of a real (tiny) model."""

from array import array

import pytest
import torch
from tests.models import VOCABULARY, save_model
from tests.worker.execution.planner import Planner, make_request

from fairlead_worker.execution.pack import pack
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.scheduler.plan import Row, StepPlan

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    return load_model(str(folder))


def sampling(tokens: int, **settings: float) -> Sampling:
    return Sampling(max_tokens=tokens, **settings)  # type: ignore[arg-type]  # the callers give the right types


def pages(*numbers: int) -> "array[int]":
    return array("i", numbers)


def test_packing_keeps_no_view_of_growing_arrays() -> None:
    """A view of an array forbids it to grow: the next token would be a BufferError."""
    request, table = make_request("a", [10, 11, 12], sampling(1)), pages(7, 2)
    step = pack(StepPlan([Row(request, 0, 3, table, samples=True)]), 2, CPU)
    request.tokens.append(13)
    table.append(9)
    table[0] = 0
    assert step.page_indices.tolist() == [7, 2]
    assert step.tokens.tolist() == [10, 11, 12]


def test_packing_lays_rows_end_to_end() -> None:
    first = make_request("a", [10, 11, 12, 13, 14], sampling(1))
    second = make_request("b", [20, 21, 4_000_000_000], sampling(1))
    plan = StepPlan([Row(first, 1, 3, pages(7, 2, 9), samples=False), Row(second, 2, 1, pages(4, 5), samples=True)])
    step = pack(plan, 2, CPU)
    assert step.tokens.tolist() == [11, 12, 13, 4_000_000_000]
    assert step.positions.tolist() == [1, 2, 3, 2]
    assert step.slots.tolist() == [15, 4, 5, 10]
    assert (step.page_indptr.tolist(), step.page_indices.tolist()) == ([0, 2, 4], [7, 2, 4, 5])
    assert step.page_indptr.dtype == step.page_indices.dtype == torch.int32
    assert [table.tolist() for table in step.tables()] == [[7, 2], [4, 5]]
    assert step.sampling.tolist() == [3]


def test_a_page_table_too_short_is_refused() -> None:
    request = make_request("a", range(5), sampling(1))
    with pytest.raises(ValueError, match="request a: 2 pages of 2 tokens for 5 tokens"):
        pack(StepPlan([Row(request, 0, 5, pages(1, 2), samples=True)]), 2, CPU)


def test_storage_is_sized_by_pages_or_bytes(loaded: LoadedModel) -> None:
    assert RunnerBuilder(loaded=loaded, page_size=16, kv_pages=9).build().backend.pages == 9
    page_bytes = 2 * 2 * (16 + 16) * 16 * 4
    assert RunnerBuilder(loaded=loaded, page_size=16, kv_cache_bytes=page_bytes * 5 + 1).build().backend.pages == 5
    with pytest.raises(ValueError, match=f"one page of 16 tokens takes {page_bytes} bytes"):
        RunnerBuilder(loaded=loaded, page_size=16, kv_cache_bytes=1).build()


def test_an_empty_plan_does_nothing(loaded: LoadedModel) -> None:
    assert RunnerBuilder(loaded=loaded, page_size=16, kv_pages=1).build().execute(StepPlan()).tokens == []


def test_only_sampling_rows_come_back(loaded: LoadedModel) -> None:
    runner = RunnerBuilder(loaded=loaded, page_size=4, kv_pages=10).build()
    chunk = make_request("chunk", range(2, 12), sampling(1))
    whole = make_request("whole", range(2, 7), sampling(1, temperature=0, logprobs=3))
    plan = StepPlan([Row(chunk, 0, 6, pages(0, 1), samples=False), Row(whole, 0, 5, pages(2, 3), samples=True)])
    assert runner.logits(plan).shape == (1, VOCABULARY)
    result = runner.execute(plan)
    assert len(result.tokens) == len(result.logprobs) == 1
    assert result.seconds > 0
    (logprobs,) = result.logprobs[0]
    assert logprobs.top_ids[0] == result.tokens[0][0]
    assert logprobs.top_logprobs[0] == pytest.approx(logprobs.chosen)
    assert runner.execute(StepPlan([Row(chunk, 6, 2, pages(0, 1), samples=False)])).tokens == []


@pytest.mark.parametrize("chunk", [3, 16, 1 << 30])
@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}, {"top_k": 20, "seed": -4}], ids=str
)
def test_tokens_do_not_depend_on_company_or_chunks(loaded: LoadedModel, settings: dict[str, float], chunk: int) -> None:
    prompts = [[(i * 37 + j * 11) % 500 + 2 for j in range(n)] for i, n in enumerate((1, 5, 16, 40, 130))]

    def run(chosen: list[list[int]], chunk: int) -> list[list[int]]:
        requests = [make_request(str(i), prompt, sampling(10, **settings)) for i, prompt in enumerate(chosen)]
        Planner(requests, 60, 8, chunk).run(RunnerBuilder(loaded=loaded, page_size=8, kv_pages=60).build())
        return [request.tokens[request.prompt_length :].tolist() for request in requests]

    assert run(prompts, chunk) == [run([prompt], 1 << 30)[0] for prompt in prompts]
