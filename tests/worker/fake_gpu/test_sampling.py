"""Sampling on a fake GPU: launches, bytes and waits of each setting, with the fused kernel and without."""

import logging
from typing import Any

import pytest
import torch
from tests.worker.execution.planner import make_request
from tests.worker.fake_gpu.device.gpu import CUDA, FakeGpu
from tests.worker.fake_gpu.device.record import Record
from tests.worker.fake_gpu.runs import DRAWN, GREEDY, PAGE, PAGES, SAMPLINGS, load, serve
from tests.worker.fake_gpu.waits import TORCH_FILTERS, unexpected

from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.sampling.sampler import choose
from fairlead_worker.sampling.trial import make_fused_sampler

ROWS, VOCABULARY = 64, 128_256
OWN: dict[str, dict[str, Any]] = {name: setting for name, setting in SAMPLINGS.items() if name not in ("logprobs", "thinking")}


def record(gpu: FakeGpu, samplings: list[Sampling]) -> Record:
    """Return what the choice of one step launches, with logits in bfloat16."""
    requests = [make_request(str(number), range(5), sampling, number) for number, sampling in enumerate(samplings)]
    logits = torch.empty(len(requests), VOCABULARY, dtype=torch.bfloat16, device=CUDA)
    fused = make_fused_sampler(CUDA, VOCABULARY, torch.bfloat16)
    gpu.record = Record()
    choose(logits, requests, fused=fused)
    made, gpu.record = gpu.record, Record()
    return made


@pytest.mark.parametrize("name", OWN)
def test_a_choice_is_one_kernel_and_waits_for_nothing(gpu: FakeGpu, name: str) -> None:
    made = record(gpu, [Sampling(max_tokens=4, **OWN[name])] * ROWS)
    copies = made.by_name()["copy to device"]
    assert not made.waits and made.launches - copies == 1 and copies <= 4, "what the rows ask for, the edits of logits, masks"


def test_a_choice_has_as_many_launches_for_any_number_of_rows(gpu: FakeGpu) -> None:
    mixed = [Sampling(max_tokens=4, **setting) for setting in OWN.values()]
    few, many = (record(gpu, mixed * times) for times in (1, 30))
    assert few.launches == many.launches <= 5 and not few.waits and not many.waits


def test_a_runner_uses_the_kernel(gpu: FakeGpu) -> None:
    runner = RunnerBuilder(loaded=load("llama"), page_size=PAGE, kv_pages=PAGES).build()
    gpu.record.clear()
    serve(runner, GREEDY, DRAWN, Sampling(max_tokens=2, top_p=0.9, ignore_eos=True))
    assert unexpected(gpu.record) == []
    assert "triton.choose_tokens" in gpu.record.by_name() and "argmax" not in gpu.record.by_name()


def test_without_the_kernel_torch_sorts_and_waits(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("fairlead_worker.sampling.trial.find_difference", lambda *_: "18 of 18 tokens are others")
    with caplog.at_level(logging.WARNING):
        runner = RunnerBuilder(loaded=load("llama"), page_size=PAGE, kv_pages=PAGES).build()
    assert runner.fused_sampler is None and "18 of 18 tokens" in caplog.text
    gpu.record.clear()
    serve(runner, DRAWN, Sampling(max_tokens=2, top_p=0.9, ignore_eos=True))
    assert unexpected(gpu.record) != [] == unexpected(gpu.record, TORCH_FILTERS)
    assert "topk" in gpu.record.by_name()
