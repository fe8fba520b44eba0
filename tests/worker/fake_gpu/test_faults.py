"""Planted faults of kinds that other engines have had: the checks on the fake GPU find them.

The checks are mixed devices (`MixedDevices`), waits without a reason (`unexpected`), and budgets (`exceeded`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.worker.fake_gpu.budgets import CASES, PIECES, PIECEWISE, STEPS, exceeded, measure, read, record
from tests.worker.fake_gpu.device.gpu import FakeGpu, MixedDevices
from tests.worker.fake_gpu.device.record import Wait
from tests.worker.fake_gpu.runs import DRAWN, GREEDY, PAGE, PAGES, load, serve
from tests.worker.fake_gpu.test_engine import run_engine
from tests.worker.fake_gpu.waits import unexpected

from fairlead_worker.execution import overlap
from fairlead_worker.execution.cuda_graphs import decodes as graphs
from fairlead_worker.execution.cuda_graphs import piecewise
from fairlead_worker.execution.forward import LayerForward
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.kernels import flashinfer
from fairlead_worker.kernels.base import PackedStep, StepContext
from fairlead_worker.model import fuse
from fairlead_worker.model.fused.changes import Unfused
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.sampling import sampler

Patch = pytest.MonkeyPatch


def runner_of(loaded: LoadedModel) -> ModelRunner:
    return RunnerBuilder(loaded=loaded, page_size=PAGE, kv_pages=PAGES).build()


def waits_of(gpu: FakeGpu, loaded: LoadedModel | None = None, runner: ModelRunner | None = None) -> list[Wait]:
    runner = runner or runner_of(loaded or load("llama"))
    gpu.record.clear()
    serve(runner, GREEDY, DRAWN)
    return unexpected(gpu.record)


def excess(gpu: FakeGpu, case: str = "llama bf16", part: str = "layer", step: str = "decode") -> str:
    assert case in CASES and step in (*STEPS, *(each + PIECEWISE for each in PIECES.get(case, ())))
    return "; ".join(exceeded(measure(gpu, case, step)[step][part], read()[case][step][part]))


def around(monkeypatch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace `owner.name` by `change`, which gets the original first."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **named: change(original, *args, **named))


# Waits


def test_the_longest_sequence_read_in_each_step(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """`seq_lens.max().item()` in attention metadata: the host cannot prepare the next step meanwhile."""

    def call(original: Any, self: LayerForward, step: PackedStep, context: StepContext) -> torch.Tensor:
        assert step.positions.max().item() >= 0
        return original(self, step, context)

    around(monkeypatch, LayerForward, "__call__", call)
    (wait,) = {found.site for found in waits_of(gpu)}
    assert wait.endswith(":call")


def test_inputs_copied_from_pageable_memory(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """`non_blocking=True` on memory that is not pinned: the copy waits all the same."""
    monkeypatch.setattr("fairlead_worker.execution.pack.to_device", lambda values, device: values.to(device, non_blocking=True))
    assert {wait.what for wait in waits_of(gpu)} == {"copy of pageable memory to the device"}


def test_rows_chosen_by_a_mask(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """`tokens[mask]` calls `nonzero`, whose result the host needs for its shape."""
    around(monkeypatch, sampler, "force", lambda original, tokens, *rest: (tokens[tokens > 0], original(tokens, *rest))[1])
    assert any("by a mask" in wait.what for wait in waits_of(gpu))


@pytest.mark.parametrize(
    "call", [torch.nonzero, torch.bincount, lambda ids: torch.repeat_interleave(ids, ids)], ids=["nonzero", "bincount", "repeat"]
)
def test_shapes_that_depend_on_values(gpu: FakeGpu, monkeypatch: Patch, call: Callable[[torch.Tensor], Any]) -> None:
    """Token counts of experts by `bincount`, their ids by `unique`, rows by `repeat_interleave` without an output size."""
    around(monkeypatch, sampler, "force", lambda original, tokens, *rest: (call(tokens), original(tokens, *rest))[1])
    assert any("shape depends on values" in wait.what for wait in waits_of(gpu))


def test_page_tables_planned_from_the_device(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """FlashInfer's `plan` copies tables of the device back to the host, which waits for all queued work."""

    def plan(original: Any, kind: Any, spec: Any, wrapper: Any, paging: Any) -> None:
        original(kind, spec, wrapper, replace(paging, page_indptr=paging.page_indptr.to("cuda", non_blocking=True)))

    runner = runner_of(load("llama"))
    around(monkeypatch, flashinfer, "plan_decodes", plan)
    with pytest.raises(MixedDevices, match="page tables on the host"):
        waits_of(gpu, runner=runner)


def test_tokens_read_before_the_next_launch(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """Overlap that copies its tokens without an event waits for the step that it has just launched."""
    around(monkeypatch, overlap, "choose", lambda original, *args, **named: (made := original(*args, **named), made.tolist())[0])
    runner = RunnerBuilder(loaded=load("llama"), page_size=PAGE, kv_pages=PAGES).build()
    gpu.record.clear()
    run_engine(runner, [GREEDY, DRAWN], overlapped=True)
    assert unexpected(gpu.record) != []


# Mixed devices


# Budgets


def test_a_fusion_that_is_lost(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """The residual sum and the norm are kernels of their own again."""

    def refuse(*_: Any) -> Any:
        raise Unfused("planted")

    monkeypatch.setattr(fuse, "_fuse_norms", refuse)
    assert "add: 2 kernels, 0 allowed" in excess(gpu)


def test_fa3_for_float8(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """fa3 takes KV in float8 only with queries in float8 (vllm#27604): its trial at the start fails, and prefills use fa2."""
    monkeypatch.setattr(flashinfer.hopper, "is_supported", lambda device, float8: True)
    monkeypatch.setattr(flashinfer.hopper, "has_enough_tiles", lambda *_: True)
    used = record(gpu, runner_of(load("llama", kv_scale=1.0)), "prefill").by_name()
    assert used["flashinfer.prefill fa3"] == 0 < used["flashinfer.prefill"]


def test_logits_of_every_token_of_a_prompt(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """The head on all tokens of a chunk instead of the last one: megabytes and a thousand times the work."""

    def call(original: Any, self: LayerForward, step: PackedStep, context: StepContext) -> torch.Tensor:
        output = self._model(input_ids=step.tokens[None], position_ids=step.positions[None], use_cache=False, step=context)
        return output.logits[0][step.sampling]

    around(monkeypatch, LayerForward, "__call__", call)
    found = excess(gpu, part="step", step="prefill")
    assert "flops" in found and "bytes" in found


def test_graphs_that_are_never_replayed(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """Every batch runs eagerly, because no size matches: thousands of launches of a large model."""

    def launches() -> int:
        runner: ModelRunner = RunnerBuilder(loaded=load("llama", num_hidden_layers=4), page_size=PAGE, kv_pages=PAGES, graph_rows=2).build()
        gpu.record.clear()
        serve(runner, GREEDY)
        return gpu.record.launches

    replayed = launches()
    monkeypatch.setattr(graphs.GraphedDecodes, "run", lambda self, step: None)
    assert launches() >= replayed + 3 * 4 * 10, "three decodes of four layers"


# Piecewise graphs


def test_pieces_that_are_never_replayed(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """Every chunk runs eagerly, because no size fits: what launches cost shows in no other check."""
    around(monkeypatch, piecewise.PiecewiseGraphs, "run", lambda original, self, step: None)
    assert "launches: 10, 2 allowed" in excess(gpu, step="prefill in pieces")
