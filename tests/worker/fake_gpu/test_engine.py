"""The loops, LoRA, drafts, the host tier, scores and ranks on a fake GPU: no operation mixes devices, and waits have a reason."""

from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace
from tests.models import save_model
from tests.worker.execution.planner import Planner, make_request
from tests.worker.execution.test_draft import Asking
from tests.worker.fake_gpu.device.gpu import FakeGpu
from tests.worker.fake_gpu.device.worker import FakeGroup
from tests.worker.fake_gpu.runs import DRAWN, GREEDY, PAGE, PAGES, load, serve, write_adapter
from tests.worker.fake_gpu.waits import SCORE, unexpected
from tests.worker.sampling.test_verify import run as serve_all

from fairlead_index.hashing import extend
from fairlead_worker.build import choose_modes, graph_rows
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.config import WorkerConfig
from fairlead_worker.engine.loop import run_plain
from fairlead_worker.engine.overlap import run_overlapped
from fairlead_worker.execution import trial
from fairlead_worker.execution.draft import Drafts
from fairlead_worker.execution.overlap import OverlappedRunner
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.ipc.messages import Failed, FromEngine, PoolingKind, Sampling, Step, StepModes, Stop, Submit, ToEngine
from fairlead_worker.kernels.base import PackedStep
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import load_model
from fairlead_worker.parallel.lead import lead, to_step
from fairlead_worker.parallel.messages import DropGraphs, Run
from fairlead_worker.parallel.ranks import Ranks
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.plan import Row, StepPlan
from fairlead_worker.scheduler.scheduler import Scheduler


class Client:
    """Sends all requests at once, and stops the loop when all have ended."""

    def __init__(self, samplings: Sequence[Sampling], pooling: PoolingKind | None = None) -> None:
        self._messages: list[ToEngine] = [
            Submit(str(number), array("I", range(2, 30 + 20 * number)).tobytes(), sampling, 0, pooling=pooling)
            for number, sampling in enumerate(samplings)
        ]
        self._running = {str(number) for number in range(len(samplings))}

    def receive(self, timeout: float) -> list[ToEngine]:
        messages, self._messages = self._messages, []
        return messages if self._running else [Stop()]

    def send(self, message: FromEngine) -> None:
        assert not isinstance(message, Failed), message
        if isinstance(message, Step):
            self._running -= {output.id for output in message.each() if output.finish}


def run_engine(runner: ModelRunner, samplings: Sequence[Sampling], overlapped: bool = False, pooling: PoolingKind | None = None) -> None:
    client = Client(samplings, pooling)
    cache = PrefixCache(PagePool(PAGES, PAGE), 2 * PAGE, extend)
    scheduler = Scheduler(SchedulerConfig(512, chunked_prefill_size=32), cache)
    if overlapped:
        assert run_overlapped(scheduler, OverlappedRunner(runner), client) == 0
    else:
        assert run_plain(scheduler, runner, client) == 0


@pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
def test_the_loops_wait_for_tokens_only(gpu: FakeGpu, overlapped: bool) -> None:
    runner = RunnerBuilder(loaded=load("llama"), page_size=PAGE, kv_pages=PAGES, graph_rows=4).build()
    gpu.record.clear()
    run_engine(runner, [GREEDY, DRAWN, Sampling(max_tokens=6, logprobs=2, ignore_eos=True)], overlapped)
    assert unexpected(gpu.record) == []
    if overlapped:
        reads = {wait.site for wait in gpu.record.waits}
        assert "sampling/sampler.py:sample" not in reads, "tokens are read through an event, after the next launch"


def test_a_model_is_loaded_for_a_gpu_and_measured(gpu: FakeGpu, tmp_path: Path, quick_collections: None) -> None:
    """The loader's and the memory profile's branches for GPUs, with every fusion, and graphs."""
    save_model("qwen3", tmp_path, head_dim=64)
    loaded = load_model(str(tmp_path), dtype="bfloat16", device="cuda")
    assert loaded.fused == ("projections", "norm", "activation", "rope")
    steps = SchedulerConfig(256, max_num_seqs=4, chunked_prefill_size=64)
    runner = RunnerBuilder(loaded=loaded, page_size=PAGE, kv_pages=0, steps=steps, graph_rows=4, host_kv_cache_bytes=0).build()
    assert runner.step_tokens > 64 and runner.backend.pages > 1_000_000, "141 GB hold many pages"
    gpu.record.clear()
    serve(runner, GREEDY, DRAWN)
    assert unexpected(gpu.record) == []


def test_lora_adapters_with_and_without_graphs(gpu: FakeGpu, tmp_path: Path) -> None:
    loaded = load("llama")
    write_adapter(loaded.model, tmp_path, rank=4)
    adapters = AdapterSet(loaded, 2, 8)
    runner = RunnerBuilder(loaded=loaded, page_size=PAGE, kv_pages=PAGES, adapters=adapters, graph_rows=4).build()
    adapters.load(1, "a", "file:///a", tmp_path)
    gpu.record.clear()
    requests = [make_request(str(number), range(2, 40), GREEDY) for number in range(3)]
    for adapter, request in enumerate(requests):
        request.submit = replace(request.submit, adapter=min(adapter, 1))
    Planner(requests, PAGES, PAGE, 24).run(runner)
    assert unexpected(gpu.record) == []
    assert gpu.record.launches < len(gpu.record.kernels), "decodes with adapters are in graphs"


def test_drafts_are_read_once_and_behind_the_launch_of_the_verifying_pass(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = RunnerBuilder(loaded=load("llama"), page_size=PAGE, kv_pages=PAGES, draft=load("llama"), graph_rows=4).build()
    drafter = runner.drafter
    assert drafter is not None
    launched: list[int] = []
    chains: list[int] = []
    run, draft = runner.run, drafter.draft

    def watch(step: PackedStep) -> torch.Tensor:
        logits = run(step)
        launched.append(gpu.record.launches)
        return logits

    def count(plan: StepPlan) -> Drafts | None:
        drafts = draft(plan)
        chains.append(drafter.forwards)
        return drafts

    monkeypatch.setattr(runner, "run", watch)
    monkeypatch.setattr(drafter, "draft", count)
    gpu.record.clear()
    longer = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
    asking = Asking([make_request(str(number), range(2, 40), longer) for number in range(2)], PAGES, PAGE, 1 << 30)
    serve_all(runner, asking)
    assert unexpected(gpu.record) == []
    reads = [wait.launches for wait in gpu.record.waits if wait.site == "kernels/transfer.py:wait"]
    assert max(chains) > 1 and len(reads) == sum(1 for length in chains if length), "one copy for each chain"
    drafting = [at for at, length in zip(launched, chains, strict=True) if length]
    assert reads == drafting, "the verifying pass is launched before the host waits, and nothing between"


def test_other_ranks_get_drafts_with_the_arrays_of_the_host(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = RunnerBuilder(loaded=load("llama", FakeGroup(gpu, 0, 2)), page_size=PAGE, kv_pages=PAGES, draft=load("llama")).build()
    run, drafted = runner.run, list[int]()

    def watch(step: PackedStep) -> torch.Tensor:
        assert step.host is not None, "the arrays on the device are those of the host"
        drafted.append(len(step.sampling))
        return run(step)

    monkeypatch.setattr(runner, "run", watch)
    request = make_request("0", range(2, 40), Sampling(max_tokens=24, temperature=0, ignore_eos=True))
    serve_all(runner, Asking([request], PAGES, PAGE, 1 << 30))
    assert max(drafted) > 2


@patch.object(trial, "try_graphs", lambda *_: "")
def test_on_a_gpu_graphs_and_overlap_are_on_by_default(gpu: FakeGpu) -> None:
    config = WorkerConfig(model="file:///m", max_num_seqs=4)
    assert graph_rows(config, "cuda") == 512
    runner = RunnerBuilder(loaded=load("llama"), page_size=PAGE, kv_pages=PAGES, graph_rows=4, piece_tokens=100).build()
    modes = choose_modes(config, runner, SchedulerConfig(512, max_num_seqs=4))
    assert modes == StepModes("on", "on", piecewise_graphs="on: up to 96 tokens")
    off = WorkerConfig(model="file:///m", overlap="off", max_cudagraph_capture_size=0)
    assert choose_modes(off, runner, SchedulerConfig(512)).overlap == "off: --overlap off"


def test_ranks_have_graphs_and_overlap_by_default(gpu: FakeGpu) -> None:
    """If the trial fails, all ranks free their graphs."""
    config, steps = WorkerConfig(model="file:///m", max_num_seqs=4, tensor_parallel_size=2), SchedulerConfig(512, max_num_seqs=4)
    runners, groups, sent = ranks_of(gpu, "llama")
    no_pieces = "off: --tensor-parallel-size 2: rank 0 chooses graphs for decodes only"
    with patch.object(trial, "try_graphs", lambda *_: ""):
        assert choose_modes(config, runners[0], steps) == StepModes("on", "on", piecewise_graphs=no_pieces)
    follow(sent, runners[1], groups[1])
    sent.messages.clear()
    with patch.object(trial, "_guard", lambda *_: "other numbers"):
        modes = choose_modes(config, runners[0], steps)
    assert modes.cuda_graphs.startswith("off: ") and "other numbers" in modes.fallback and runners[0].graphs is None
    assert sent.messages[-1] == DropGraphs()


def test_drafted_tokens_are_one_row_of_their_request_in_graphs(gpu: FakeGpu) -> None:
    steps = SchedulerConfig(512, max_num_seqs=4, chunked_prefill_size=64, speculative_method="ngram")
    runner = RunnerBuilder(loaded=load("llama"), page_size=PAGE, kv_pages=PAGES, steps=steps, graph_rows=8).build()
    request = make_request("0", [2] * 40, GREEDY)
    row = Planner([request], PAGES, PAGE).row(request)
    verified = Row(request, 39, 4, row.pages, True, [2, 2, 2])
    for _ in range(2):  # the first step has no earlier plan to wait for
        gpu.record.clear()
        runner.logits(StepPlan([verified], drafted=3))
    assert unexpected(gpu.record) == [] and gpu.record.launches < len(gpu.record.kernels), "a graph is one launch"
    attended = [kernel for kernel in gpu.record.kernels if kernel.name == "flashinfer.prefill"]
    assert len(attended) == 2 and not gpu.record.by_name()["flashinfer.decode"]
    assert all(kernel.bytes < 2 * 43 * 2 * 64 * 2 + 3 * 4 * 4 * 64 * 2 for kernel in attended), "the KV of 43 tokens is read once"


def test_scores_and_embeddings_wait_for_what_they_return(gpu: FakeGpu) -> None:
    runner = RunnerBuilder(loaded=load("llama"), page_size=PAGE, kv_pages=PAGES).build()
    gpu.record.clear()
    run_engine(runner, [Sampling(max_tokens=2, temperature=0, prompt_logprobs=2, ignore_eos=True)])
    run_engine(runner, [GREEDY], pooling="mean")
    assert unexpected(gpu.record, SCORE) == []


def test_the_host_tier_waits_for_nothing(gpu: FakeGpu) -> None:
    runner = RunnerBuilder(loaded=load("llama"), page_size=PAGE, kv_pages=PAGES, host_kv_cache_bytes=1 << 22).build()
    assert runner.host is not None
    gpu.record.clear()
    runner.host.copy([(1, 0), (2, 1)], [(3, 0)])
    assert gpu.record.waits == []
    assert gpu.record.by_name()["copy to host"] == 2


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_float8_kv_does_not_wait(gpu: FakeGpu, family: str) -> None:
    """In graphs, in the host tier, and where the reference serves the layers; with a scale, which is a kernel after the attention."""
    runner = RunnerBuilder(
        loaded=load(family, kv_scale=0.5), page_size=PAGE, kv_pages=PAGES, graph_rows=2, host_kv_cache_bytes=1 << 22
    ).build()
    gpu.record.clear()
    serve(runner, GREEDY, DRAWN)
    assert runner.host is not None
    runner.host.copy([(1, 0), (2, 1)], [(3, 0)])
    assert unexpected(gpu.record) == []
    copied = [kernel for kernel in gpu.record.kernels if kernel.name == "copy to host"][-2:]
    assert {kernel.bytes for kernel in copied} == {runner.backend.spec.page_bytes}
    runner.host = None  # unpins its memory


def test_lora_adapters_on_a_rank_are_in_graphs(gpu: FakeGpu, tmp_path: Path) -> None:
    """The slots have the sizes of this rank's part of each layer."""
    write_adapter(load("llama").model, tmp_path, rank=4)
    group = FakeGroup(gpu, 1, 2)
    loaded = load("llama", group)
    adapters = AdapterSet(loaded, 2, 8, growing=True, group=group)
    runner = RunnerBuilder(loaded=loaded, page_size=PAGE, kv_pages=PAGES, adapters=adapters, graph_rows=2, group=group).build()
    adapters.load(1, "a", "file:///a", tmp_path)
    requests = [make_request(str(number), range(2, 40), GREEDY) for number in range(2)]
    requests[1].submit = replace(requests[1].submit, adapter=1)
    gpu.record.clear()
    Planner(requests, PAGES, PAGE, 64).run(runner)
    assert unexpected(gpu.record) == [] and runner.graph_failure == ""
    assert gpu.record.launches < len(gpu.record.kernels), "decodes with adapters are in graphs"


COLLECTIVES = ("flashinfer.allreduce_norm", "all_reduce", "all_gather", "broadcast")


class Sent:
    """The part of `Ranks` that leading needs."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def collective(self) -> nullcontext[None]:
        return nullcontext()


def ranks_of(gpu: FakeGpu, family: str) -> tuple[list[ModelRunner], list[FakeGroup], Sent]:
    """Return the runners of two ranks, with graphs, of which the first leads."""
    groups = [FakeGroup(gpu, rank, 2) for rank in (0, 1)]
    runners = [
        RunnerBuilder(loaded=load(family, group, num_hidden_layers=2), page_size=PAGE, kv_pages=PAGES, graph_rows=4, group=group).build()
        for group in groups
    ]
    sent = Sent()
    lead(runners[0], cast(Ranks, sent), groups[0])
    gpu.record.clear()
    return runners, groups, sent


def follow(sent: Sent, runner: ModelRunner, group: FakeGroup) -> None:
    """Do on another rank what was sent, as `parallel.follower.serve`."""
    for message in sent.messages:
        assert isinstance(message, Run)
        step, graph, places = to_step(message, runner.loaded.device)
        if message.shares:
            group.share(step.tokens)
        runner.follow(step, graph, places)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
def test_every_rank_of_a_sharded_model(gpu: FakeGpu, family: str, overlapped: bool) -> None:
    """The others do what rank 0 does, from the same graphs, and wait for nothing: their arrays arrive in the step's message."""
    runners, groups, sent = ranks_of(gpu, family)
    run_engine(runners[0], [GREEDY, DRAWN], overlapped)
    assert unexpected(gpu.record) == []
    leading, launches = gpu.record.by_name(), gpu.record.launches
    gpu.record.clear()
    follow(sent, runners[1], groups[1])
    assert {wait.site for wait in gpu.record.waits} <= {"kernels/flashinfer.py:_stage"}, "the last plan has left FlashInfer's memory"
    following = gpu.record.by_name()
    assert [leading[name] for name in COLLECTIVES] == [following[name] for name in COLLECTIVES]
    sums = [leading[name] // len(sent.messages) for name in ("flashinfer.allreduce_norm", "all_reduce")]
    layers = len(runners[0].loaded.layers)
    assert sums == {"llama": [2 * layers, 0], "qwen3_moe": [layers, layers], "gemma2": [0, 2 * layers]}[family], (
        "two in each layer, with the norm behind them if they can"
    )
    assert bool(leading["broadcast"]) == overlapped
    assert any(message.graph for message in sent.messages) and gpu.record.launches < launches < sum(leading.values())


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_quantized_layers_do_not_wait(gpu: FakeGpu, quantization: str) -> None:
    runner = RunnerBuilder(loaded=load("llama", quantization=quantization), page_size=PAGE, kv_pages=PAGES, graph_rows=2).build()
    gpu.record.clear()
    serve(runner, GREEDY, DRAWN)
    assert unexpected(gpu.record) == []
    products = {kernel.dtype for kernel in gpu.record.kernels if kernel.dtype}
    assert {"fp8": "float8_e4m3fn", "int4": "int4"}[quantization] in products
