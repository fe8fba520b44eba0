"""Sampling on a fake GPU: launches, bytes and waits of each setting, with FlashInfer's filters and without."""

import logging
from typing import Any

import pytest
import torch
from tests.worker.execution.planner import make_request
from tests.worker.fake_gpu.device.gpu import CUDA, FakeGpu
from tests.worker.fake_gpu.device.record import Record
from tests.worker.fake_gpu.runs import DRAWN, GREEDY, PAGE, PAGES, load, serve
from tests.worker.fake_gpu.waits import TORCH_FILTERS, unexpected

from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.sampling.device_filters import DeviceFilters, make_device_filters
from fairlead_worker.sampling.sampler import choose

ROWS, VOCABULARY = 64, 128_256
BUDGETS: dict[str, tuple[dict[str, Any], int, float]] = {
    "greedy": ({"temperature": 0}, 20, 2.3),
    "temperature": ({}, 46, 38.6),
    "top_k": ({"top_k": 20}, 45, 34.2),
    "large top_k": ({"top_k": 400, "top_p": 0.9}, 45, 36.1),
    "top_p": ({"top_p": 0.9}, 89, 101.4),
    "top_p and min_p": ({"top_p": 0.9, "min_p": 0.1}, 98, 124.5),
}
"""Setting, most launches, most bytes for each logit. The logits have 2 bytes, and 20 bytes scale them in float32."""


def record(gpu: FakeGpu, samplings: list[Sampling], filters: DeviceFilters | None) -> Record:
    """Return what the choice of one step launches, with logits in bfloat16."""
    requests = [make_request(str(number), range(5), sampling, number) for number, sampling in enumerate(samplings)]
    logits = torch.empty(len(requests), VOCABULARY, dtype=torch.bfloat16, device=CUDA)
    gpu.record = Record()
    choose(logits, requests, filters=filters)
    made, gpu.record = gpu.record, Record()
    return made


def bytes_per_logit(made: Record, rows: int = ROWS) -> float:
    return made.totals()["bytes"] / (rows * VOCABULARY)


@pytest.mark.parametrize("name", BUDGETS)
def test_a_choice_stays_within_its_budget_and_waits_for_nothing(gpu: FakeGpu, name: str) -> None:
    setting, launches, bytes_each = BUDGETS[name]
    filters = make_device_filters(CUDA)
    assert filters is not None
    made = record(gpu, [Sampling(max_tokens=4, **setting)] * ROWS, filters)
    assert not made.waits and made.launches <= launches and bytes_per_logit(made) <= bytes_each


def test_a_choice_has_as_many_launches_for_any_number_of_rows(gpu: FakeGpu) -> None:
    filters = make_device_filters(CUDA)
    mixed = [Sampling(max_tokens=4, **setting) for setting, _, _ in BUDGETS.values()]
    few, many = (record(gpu, mixed * times, filters) for times in (1, 30))
    assert few.launches == many.launches and not few.waits and not many.waits


def test_only_rows_with_a_filter_pay_for_it(gpu: FakeGpu) -> None:
    filters = make_device_filters(CUDA)
    greedy, nucleus = Sampling(max_tokens=4, temperature=0), Sampling(max_tokens=4, top_p=0.9)
    alone, all_greedy = record(gpu, [nucleus], filters), record(gpu, [greedy] * 63, filters)
    together = record(gpu, [*[greedy] * 63, nucleus], filters)
    assert bytes_per_logit(together, 1) <= bytes_per_logit(all_greedy, 1) * 64 / 63 + bytes_per_logit(alone, 1) + 5, "a copy of its row"


def test_a_runner_uses_the_kernels(gpu: FakeGpu) -> None:
    runner = RunnerBuilder(loaded=load("llama"), page_size=PAGE, kv_pages=PAGES).build()
    gpu.record.clear()
    serve(runner, GREEDY, DRAWN, Sampling(max_tokens=2, top_p=0.9, ignore_eos=True))
    assert unexpected(gpu.record) == []
    assert {"flashinfer.top_k", "flashinfer.top_p apply"} <= gpu.record.by_name().keys()


def test_without_the_kernels_torch_sorts_and_waits(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(self: DeviceFilters, logits: torch.Tensor, width: int) -> None:
        raise RuntimeError("nvcc: not found")

    monkeypatch.setattr(DeviceFilters, "likeliest", refuse)
    with caplog.at_level(logging.WARNING):
        runner = RunnerBuilder(loaded=load("llama"), page_size=PAGE, kv_pages=PAGES).build()
    assert runner.filters is None and "nvcc: not found" in caplog.text
    gpu.record.clear()
    serve(runner, DRAWN, Sampling(max_tokens=2, top_p=0.9, ignore_eos=True))
    assert unexpected(gpu.record) != [] == unexpected(gpu.record, TORCH_FILTERS)
    assert "topk" in gpu.record.by_name()
