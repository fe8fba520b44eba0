"""Planted faults, each of a kind that other engines have had: a check on the fake GPU finds every one of them.

The checks are mixed devices (`MixedDevices`), waits without a reason (`unexpected`), and budgets (`exceeded`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from bench.gpu.fake import flashinfer as fake_flashinfer
from bench.gpu.fake.experts import FakeProduct
from bench.gpu.fake.gpu import FakeGpu, MixedDevices
from bench.gpu.fake.record import Wait
from bench.gpu.fake.rounder import FakeRounder
from bench.gpu.fake.worker import FakeGroup
from tests.worker.fake_gpu.budgets import CASES, PIECES, PIECEWISE, STEPS, exceeded, measure, read, record
from tests.worker.fake_gpu.runs import DRAWN, GREEDY, PAGE, PAGES, load, serve
from tests.worker.fake_gpu.test_engine import run_engine
from tests.worker.fake_gpu.waits import unexpected
from torch import nn

from fairlead_worker.execution import overlap
from fairlead_worker.execution.cuda_graphs import decodes as graphs
from fairlead_worker.execution.cuda_graphs import piecewise
from fairlead_worker.execution.forward import ModuleForward
from fairlead_worker.execution.runner import ModelRunner, make_runner
from fairlead_worker.kernels import flashinfer
from fairlead_worker.kernels.base import PackedStep, StepContext
from fairlead_worker.model import expert_checkpoint
from fairlead_worker.model.fused import fuse, norms
from fairlead_worker.model.fused.patch import Unfused
from fairlead_worker.model.fused.sums import SummedNorm
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.model.lowbit.experts import ExpertWeights, Route
from fairlead_worker.sampling import draw, sampler

Patch = pytest.MonkeyPatch


def runner_of(loaded: LoadedModel) -> ModelRunner:
    return make_runner(loaded, page_size=PAGE, kv_pages=PAGES)


def waits_of(gpu: FakeGpu, loaded: LoadedModel | None = None, runner: ModelRunner | None = None) -> list[Wait]:
    runner = runner or runner_of(loaded or load("llama"))
    gpu.record.clear()
    serve(runner, GREEDY, DRAWN)
    return unexpected(gpu.record)


def excess(gpu: FakeGpu, case: str = "llama bf16", part: str = "layer", step: str = "decode") -> str:
    assert case in CASES and step in (*STEPS, *(each + PIECEWISE for each in PIECES.get(case, ())))
    return "; ".join(exceeded(measure(gpu, case)[step][part], read()[case][step][part]))


def around(monkeypatch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace `owner.name` by `change`, which gets the original first."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **named: change(original, *args, **named))


def test_nothing_is_found_without_a_fault(gpu: FakeGpu) -> None:
    assert waits_of(gpu) == []
    assert excess(gpu) == "" and excess(gpu, part="step") == ""


# Waits


def test_the_longest_sequence_read_in_each_step(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """`seq_lens.max().item()` in attention metadata: the host cannot prepare the next step meanwhile."""

    def call(original: Any, self: ModuleForward, step: PackedStep, context: StepContext) -> torch.Tensor:
        assert step.positions.max().item() >= 0
        return original(self, step, context)

    around(monkeypatch, ModuleForward, "__call__", call)
    (wait,) = {found.site for found in waits_of(gpu)}
    assert wait.endswith(":call")


def test_inputs_copied_from_pageable_memory(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """`non_blocking=True` on memory that is not pinned: the copy waits all the same."""
    monkeypatch.setattr("fairlead_worker.execution.pack.to_device", lambda values, device: values.to(device, non_blocking=True))
    assert {wait.what for wait in waits_of(gpu)} == {"copy of pageable memory to the device"}


def test_rows_chosen_by_a_mask(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """`logits[mask]` calls `nonzero`, whose result the host needs for its shape."""
    around(monkeypatch, sampler, "draw", lambda original, logits, *rest: (logits[logits[:, 0] > 0], original(logits, *rest))[1])
    assert any("by a mask" in wait.what for wait in waits_of(gpu))


@pytest.mark.parametrize(
    "call",
    [torch.nonzero, torch.unique, torch.bincount, lambda ids: torch.repeat_interleave(ids, ids)],
    ids=["nonzero", "unique", "bincount", "repeat"],
)
def test_shapes_that_depend_on_values(gpu: FakeGpu, monkeypatch: Patch, call: Callable[[torch.Tensor], Any]) -> None:
    """Token counts of experts by `bincount`, their ids by `unique`, rows by `repeat_interleave` without an output size."""
    around(monkeypatch, sampler, "largest", lambda original, logits: (call(original(logits)), original(logits))[1])
    assert any("shape depends on values" in wait.what for wait in waits_of(gpu))


def test_experts_visited_one_by_one(gpu: FakeGpu) -> None:
    """A loop over the experts that a step hits: the host reads which ones, in every layer."""
    loaded = load("qwen3_moe")
    loaded.model.config._experts_implementation_internal = "eager"
    for layer in loaded.model.base_model.layers:
        vars(layer.mlp.experts).pop("forward", None)  # the family's own code again
    assert any("nonzero" in wait.what or "reads a value" in wait.what for wait in waits_of(gpu, loaded))


def test_page_tables_planned_from_the_device(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """FlashInfer's `plan` copies tables of the device back to the host, which waits for all queued work."""

    def plan(original: Any, self: Any, kind: Any, wrapper: Any, paging: Any) -> None:
        original(self, kind, wrapper, replace(paging, page_indptr=paging.page_indptr.to("cuda", non_blocking=True)))

    runner = runner_of(load("llama"))
    around(monkeypatch, flashinfer.FlashInferBackend, "_plan_decodes", plan)
    with pytest.raises(MixedDevices, match="page tables on the host"):
        waits_of(gpu, runner=runner)


def test_a_wait_inside_a_graph(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """Whatever waits cannot be captured: decodes would silently run without graphs."""

    def call(original: Any, self: ModuleForward, step: PackedStep, context: StepContext) -> torch.Tensor:
        logits = original(self, step, context)
        return logits if logits.isfinite().all() else logits.nan_to_num()

    around(monkeypatch, ModuleForward, "__call__", call)
    runner = make_runner(load("llama"), page_size=PAGE, kv_pages=PAGES, graph_rows=2)
    assert runner.graphs is not None and not runner.graphs.is_recorded


def test_tokens_read_before_the_next_launch(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """Overlap that copies its tokens without an event waits for the step that it has just launched."""
    around(monkeypatch, overlap, "choose", lambda original, *args, **named: (made := original(*args, **named), made.tolist())[0])
    runner = make_runner(load("llama"), page_size=PAGE, kv_pages=PAGES)
    gpu.record.clear()
    run_engine(runner, [GREEDY, DRAWN], overlapped=True)
    assert unexpected(gpu.record) != []


# Mixed devices


def test_row_numbers_left_on_the_host(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """Indices of the host on logits of the device: a hidden copy, and an error in a graph."""
    monkeypatch.setattr(draw, "to_device", lambda values, device, dtype=None: torch.tensor(values, dtype=dtype))
    with pytest.raises((MixedDevices, RuntimeError), match="device"):
        waits_of(gpu)


def test_page_tables_of_the_host_for_the_store(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """The kernel would read the host's addresses: an illegal memory access in the first step."""
    runner = runner_of(load("llama"))
    monkeypatch.setattr(flashinfer, "to_device", lambda values, device, dtype=None: values)
    with pytest.raises(MixedDevices, match="append_paged_kv_cache"):
        waits_of(gpu, runner=runner)


def test_a_rope_table_on_the_host(gpu: FakeGpu) -> None:
    """A buffer that is made at load and never moved."""
    loaded = load("llama")
    table = loaded.model.model.rotary_emb.forward.tables
    table[None] = table[None].cpu()
    with pytest.raises(MixedDevices, match="rope"):
        waits_of(gpu, loaded)


def test_a_sum_of_ranks_on_the_host(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """NCCL refuses tensors of the host, where gloo in a test takes them."""
    runner = runner_of(load("gemma2", FakeGroup(gpu, 0, 2)))
    around(monkeypatch, FakeGroup, "add", lambda original, self, tensor: original(self, tensor.cpu()).to("cuda"))
    with pytest.raises(MixedDevices, match="NCCL"):
        waits_of(gpu, runner=runner)


# Budgets


def test_a_fusion_that_is_lost(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """A renamed child of the layers: the residual sum and the norm are kernels of their own again."""

    def refuse(model: Any) -> Any:
        raise Unfused("it is not a list of layers followed by a norm")

    monkeypatch.setattr(fuse, "residual_patches", refuse)
    assert "add: 2 kernels, 0 allowed" in excess(gpu)


def test_float8_rounded_before_the_store(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """Casts of keys and values beside the store: `key.to(float8)` in front of an append, as engines without a fused kernel do."""
    monkeypatch.setattr(flashinfer, "Float8Store", lambda *_: None)
    assert "clamp_: 2 kernels, 0 allowed" in excess(gpu, "llama bf16, fp8 KV")


def test_float8_planned_as_16_bits(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """A plan with the queries' dtype for the pages: vLLM's first float8 KV on FlashInfer (vllm#7982)."""

    def plan(original: Any, self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **(named | {"kv_data_type": named["q_data_type"]}))

    around(monkeypatch, fake_flashinfer._Decode, "plan", plan)
    around(monkeypatch, fake_flashinfer._Prefill, "plan", plan)
    runner = runner_of(load("llama", kv_scale=1.0))
    assert isinstance(runner.backend, flashinfer.FlashInferBackend) and not runner.backend.kinds


def test_decodes_planned_as_prompts(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """Decodes beside a chunk in the plan of the chunk, where they are one query in a tile: what POD attention was made against."""
    monkeypatch.setattr(flashinfer, "count_decodes", lambda counts: 0)
    used = record(gpu, runner_of(load("llama", **CASES["llama bf16"][2])), "mixed").by_name()
    assert used["flashinfer.decode"] == 0, "the budget has one in each layer"


def test_fa3_for_float8(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """fa3 takes KV in float8 only with queries in float8 (vllm#27604): its trial at the start fails, and prefills use fa2."""
    monkeypatch.setattr(flashinfer.hopper, "is_supported", lambda device, float8: True)
    monkeypatch.setattr(flashinfer.hopper, "has_enough_tiles", lambda *_: True)
    used = record(gpu, runner_of(load("llama", kv_scale=1.0)), "prefill").by_name()
    assert used["flashinfer.prefill fa3"] == 0 < used["flashinfer.prefill"]


def test_norms_of_many_kernels(gpu: FakeGpu, monkeypatch: Patch) -> None:
    monkeypatch.setattr(norms, "rms_norm", lambda module, library: None)
    assert "rsqrt: 2 kernels, 0 allowed" in excess(gpu)


def test_projections_one_by_one(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """q, k, v, gate and up as products of their own, and the activation unfused, as it needs them stacked."""
    monkeypatch.setattr("fairlead_worker.model.loader.fuse_projections", lambda *_: 0)
    assert "mm bfloat16: 7 kernels, 4 allowed" in excess(gpu)


MOE_FP8 = "qwen3_moe fp8 in blocks"


def test_experts_widened_in_each_step(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """All experts in float32 before their product, as a fallback without a kernel does: more bytes than 16 bits take."""

    def multiply(original: Any, self: FakeProduct, inputs: Any, weights: ExpertWeights, *args: Any) -> torch.Tensor:
        assert weights.numbers().dtype == torch.float32
        return original(self, inputs, weights, *args)

    around(monkeypatch, FakeProduct, "multiply", multiply)
    assert "mul: 2 kernels, 0 allowed" in (found := excess(gpu, MOE_FP8)) and "bytes: " in found


def test_rows_of_experts_counted_on_the_host(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """`tokens_per_expert.tolist()` before a loop over the experts: the step waits in every layer, and no graph can hold it."""

    def multiply(original: Any, self: FakeProduct, inputs: Any, weights: ExpertWeights, route: Route, each: int) -> torch.Tensor:
        assert len(route.ends.tolist()) == len(weights.values)
        return original(self, inputs, weights, route, each)

    around(monkeypatch, FakeProduct, "multiply", multiply)
    family, quantization, settings = CASES[MOE_FP8]
    assert waits_of(gpu, load(family, quantization=quantization, **settings)) != []


def test_experts_rounded_after_their_activation(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """The activation and the rounding of inner values as kernels of their own."""
    monkeypatch.setattr(expert_checkpoint, "choose_rounder", lambda device, blocks=False: FakeRounder(gpu, blocks, False))
    assert "silu: 1 kernels, 0 allowed" in excess(gpu, MOE_FP8)


def test_keys_stored_twice(gpu: FakeGpu, monkeypatch: Patch) -> None:
    around(monkeypatch, flashinfer.FlashInferBackend, "store", lambda original, *args: (original(*args), original(*args))[0])
    assert "flashinfer.append_paged_kv_cache: 2 kernels, 1 allowed" in excess(gpu)


def test_a_weight_widened_to_32_bits(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """Logits in float32 by a head in float32: twice the bytes of the largest matrix, in every step."""

    def forward(original: Any, self: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        if self.out_features != 512 or self.in_features != 256 or self.weight.dtype != torch.bfloat16:
            return original(self, inputs)
        return nn.functional.linear(inputs.float(), self.weight.float()).to(inputs.dtype)

    around(monkeypatch, nn.Linear, "forward", forward)
    found = excess(gpu, part="step")
    assert "mm float32: 1 kernels, 0 allowed" in found and "bytes" in found


def test_fp8_weights_dequantized_in_each_step(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """A form that the device cannot multiply: the weight is widened before each product."""
    monkeypatch.setattr("fairlead_worker.model.quantized.ROWWISE_FP8", (10, 0))
    found = excess(gpu, "llama fp8")
    assert "mm bfloat16" in found and "bytes" in found


def test_attention_that_gathers_its_pages(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """A kind of layer that falls back to `reference` copies the KV of each row."""
    monkeypatch.setattr(flashinfer, "unsupported", lambda kind, dtype: "this kind")
    found = excess(gpu)
    assert "index_select: 2 kernels, 0 allowed" in found and "bytes" in found


def test_log_probabilities_that_nobody_asked_for(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """A softmax over the vocabulary for greedy rows, in float32."""
    around(monkeypatch, sampler, "largest", lambda original, logits: original(logits.float().log_softmax(1)))
    assert "_log_softmax: 1 kernels, 0 allowed" in excess(gpu, part="step")


def test_logits_of_every_token_of_a_prompt(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """The head on all tokens of a chunk instead of the last one: megabytes and a thousand times the work."""

    def call(original: Any, self: ModuleForward, step: PackedStep, context: StepContext) -> torch.Tensor:
        output = self._model(input_ids=step.tokens[None], position_ids=step.positions[None], use_cache=False, step=context)
        return output.logits[0][step.sampling]

    around(monkeypatch, ModuleForward, "__call__", call)
    found = excess(gpu, part="step", step="prefill")
    assert "flops" in found and "bytes" in found


def test_a_sum_of_ranks_too_many(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """Each layer sums twice, in the norms after attention and MLP; here by NCCL as well."""
    around(monkeypatch, SummedNorm, "add", lambda original, self, update, kept: original(self, self.sums.group.add(update), kept))
    assert "all_reduce: 2 kernels, 0 allowed" in excess(gpu, "llama bf16, 2 ranks")


def test_a_sum_of_ranks_apart_from_its_norm(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """NCCL for decodes: two kernels more in a layer."""
    monkeypatch.setattr("fairlead_worker.model.fused.sums.unsupported", lambda group: "a fault")
    found = excess(gpu, "llama bf16, 2 ranks")
    assert "all_reduce: 2 kernels, 0 allowed" in found and "launches: 12, 10 allowed" in found


def test_graphs_that_are_never_replayed(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """Every batch runs eagerly, because no size matches: thousands of launches of a large model."""

    def launches() -> int:
        runner: ModelRunner = make_runner(load("llama", num_hidden_layers=4), page_size=PAGE, kv_pages=PAGES, graph_rows=2)
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


def test_chunks_padded_to_the_largest_size(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """One graph for all chunks, or sizes far apart: 64 tokens are computed as 128 (sglang#35588 replays the buckets that there are)."""
    monkeypatch.setattr(piecewise, "SIZES", (128,))
    found = excess(gpu, step="prefill in pieces")
    assert "flops" in found and "launches" not in found


def test_keys_stored_outside_the_pieces(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """Whatever is left between two pieces is a launch in each layer (sglang#35849)."""

    def attend(original: Any, self: Any, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        kind = self.backend.spec.layers[layer]
        queries, output = self.queries[kind], self.outputs[kind]
        queries.copy_(query)
        self.cut(lambda: (self.backend.store(layer, self.store, key, value), self.run(layer, queries, output)))
        return output

    around(monkeypatch, piecewise._PieceContext, "attend", attend)
    assert "launches: 3, 2 allowed" in excess(gpu, step="prefill in pieces")


def test_a_head_on_all_padded_tokens(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """Logits inside the last piece, whose size is fixed: those of all tokens (TensorRT-LLM#11993 pads them)."""

    def body(original: Any, self: ModuleForward, step: PackedStep, context: StepContext) -> Any:
        return original(self, replace(step, sampling=torch.arange(len(step.tokens), device="cuda")), context)

    around(monkeypatch, ModuleForward, "run_body", body)
    found = excess(gpu, part="step", step="prefill in pieces")
    assert "flops" in found and "bytes" in found


def test_a_wait_inside_a_piece(gpu: FakeGpu, monkeypatch: Patch) -> None:
    """A kernel that waits cannot be captured. Steps with prompts then run without graphs, and the log says why."""
    around(monkeypatch, ModuleForward, "run_body", lambda original, self, *args: (made := original(self, *args), made[0].sum().item())[0])
    runner = make_runner(load("llama"), page_size=PAGE, kv_pages=PAGES, graph_rows=1, piece_tokens=64)
    assert runner.graphs is not None and runner.graphs.is_recorded and runner.pieces is None
    assert "steps with prompts cannot be recorded" in runner.graph_failure
