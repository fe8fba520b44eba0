"""CUDA graphs of a sharded model: both ranks record and replay the same ones, or neither does, and nothing waits for ever."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.exactness.harness import NEW_TOKENS, Engine, make_prompts
from tests.worker.parallel.pair import Graphs, Pair

from fairlead.random_model import make_model
from fairlead_worker.engine.overlap import Overlap
from fairlead_worker.engine.request_timer import RequestTimer
from fairlead_worker.execution.cuda_graphs.decodes import Choice, GraphedDecodes
from fairlead_worker.execution.overlap import OverlappedRunner
from fairlead_worker.execution.trial import try_graphs
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.parallel import ranks as ranks_module
from fairlead_worker.scheduler.overlap_scheduler import OverlapScheduler
from fairlead_worker.sharding import group as group_module
from fairlead_worker.sharding.group import Group
from fairlead_worker.sharding.rendezvous import file_store

PROMPTS = [[token % 500 for token in prompt] for prompt in make_prompts()[:9]]
DEADLINE = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs") / "llama"
    return make_model(folder, arch="llama", hidden=256, heads=4, kv_heads=2, head_dim=64, layers=2, vocab=500)


@pytest.fixture(scope="module")
def expected(pair: Pair, model: Path) -> list[list[int]]:
    """Tokens of the two ranks without graphs."""
    with pair.engine(model, pages=200, graphs=Graphs(rows=1, fails="capture"), chunk=16) as engine:
        return engine.serve(PROMPTS)


def recorded(engine: Engine) -> GraphedDecodes:
    assert engine.runner.graphs is not None
    return engine.runner.graphs


def test_both_ranks_replay_the_same_graphs(pair: Pair, model: Path, expected: list[list[int]]) -> None:
    with pair.engine(model, pages=200, graphs=Graphs(), chunk=16) as engine:
        assert recorded(engine).is_recorded
        assert engine.serve(PROMPTS) == expected
        assert pair.recorder is not None and len(set(pair.recorder.replays)) > 2
    report = pair.report()
    assert report["replays"] == pair.recorder.replays and report["recorded"] and not report["failure"]


def test_sums_fused_with_norms_are_recorded_and_replayed(pair: Pair, model: Path) -> None:
    """Their numbers are within the tolerance of fused layers; graphs give the same tokens as the fused layers without."""
    with pair.engine(model, pages=200, graphs=Graphs(fuses=True), chunk=16) as engine:
        assert recorded(engine).is_recorded
        assert pair.recorder is not None and pair.recorder.fused == ("norm", "sums")
        layers = engine.loaded.model.model.layers
        assert all(layer.self_attn.o_proj.deferred and layer.post_attention_layernorm.sums for layer in layers)
        replayed = engine.serve(PROMPTS)
        engine.runner.graphs = None
        assert engine.serve(PROMPTS, root=1) == replayed
    report = pair.report()
    assert report["replays"] == pair.recorder.replays and report["fused"] == list(pair.recorder.fused)


def test_fused_sums_that_one_rank_cannot_compile_are_off_on_both(pair: Pair, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else one rank would wait in a kernel of NCCL, and the other in one of FlashInfer."""
    with pair.engine(model, pages=200, graphs=Graphs(rows=1, fuses=True, lacks_sums=True), chunk=16) as engine:
        assert pair.recorder is not None and pair.recorder.fused == ("norm",)
        assert "sums stays unfused: rank 1 of 2: RuntimeError: nvcc: not found" in caplog.text
        engine.serve(PROMPTS[:1])
    assert pair.report()["fused"] == ["norm"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("stage", "at"), [("warm-up", 0), ("capture", 0), ("capture", 2)])
def test_a_rank_that_cannot_record_turns_graphs_off_on_all(
    pair: Pair, model: Path, expected: list[list[int]], stage: str, at: int, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The other rank has recorded its graph. The ranks go on with new communicators."""
    with pair.engine(model, pages=200, graphs=Graphs(rank=rank, fails=stage, at=at), chunk=16) as engine:
        graphs = recorded(engine)
        size = graphs.sizes[::-1][at]
        reason = f"rank {rank} of 2: a step of {size} decodes cannot be recorded: RuntimeError: CUDA error: planted"
        assert not graphs.is_recorded and graphs.failure == reason and reason in caplog.text
        assert engine.serve(PROMPTS) == expected
    report = pair.report()
    assert report["failure"] == reason and not report["recorded"] and not report["replays"]


def test_graphs_of_drafted_tokens_that_one_rank_cannot_record_are_off_on_both(pair: Pair, model: Path, expected: list[list[int]]) -> None:
    """All sizes are recorded again: those before the failure contain the communicators that were replaced."""
    with pair.engine(model, pages=200, graphs=Graphs(verifies=True, fails="capture", at=3), chunk=16) as engine:
        graphs = recorded(engine)
        assert graphs.is_recorded and "rank 1 of 2: a step of 4 drafted tokens" in graphs.verification_failure
        assert pair.recorder is not None and pair.recorder.recorded == [6, 6, 4, 4, 6, 4, 2, 1]
        assert engine.serve(PROMPTS) == expected
    assert pair.report()["verification_failure"] == graphs.verification_failure and pair.report()["recorded"]


def test_the_start_up_trial_compares_graphs_of_all_ranks(pair: Pair, model: Path) -> None:
    with pair.engine(model, pages=200, graphs=Graphs(rows=4), chunk=16) as engine:
        assert try_graphs(engine.runner) == "" and engine.runner.graphs is not None
    report = pair.report()
    assert set(report["replays"]) == {0, 1, 2} and not report["dropped"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_replays_differ_turns_graphs_off_on_all(pair: Pair, model: Path, rank: int) -> None:
    """As after an all-reduce whose buffers are not those of the capture (flashinfer-ai/flashinfer#1894)."""
    with pair.engine(model, pages=200, graphs=Graphs(rows=4, rank=rank, is_stale=True), chunk=16) as engine:
        assert "from float32" in try_graphs(engine.runner)
        assert engine.runner.graphs is None
    assert pair.report()["dropped"]


def test_overlapped_steps_have_the_tokens_of_the_plain_loop(pair: Pair, model: Path, expected: list[list[int]]) -> None:
    """Only rank 0 samples, and the other rank gets the tokens of the step before from its device."""
    with pair.engine(model, pages=200, graphs=Graphs(), chunk=16) as engine:
        runner = OverlappedRunner(engine.runner)
        tokens: dict[str, list[int]] = {}

        def report(plan: Any, result: Any, outputs: Any) -> None:
            for output in outputs:
                tokens.setdefault(output.id, []).extend(memoryview(output.tokens).cast("I"))

        loop = Overlap(OverlapScheduler(engine.scheduler), runner, RequestTimer(), report)
        sampling = Sampling(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        for number, prompt in enumerate(PROMPTS):
            assert engine.scheduler.submit(Submit(str(number), array("I", prompt).tobytes(), sampling, 0)) is None
        until = time.monotonic() + 10 * DEADLINE
        while not engine.scheduler.idle and time.monotonic() < until:
            loop.step()
        loop.reconcile()
        assert [tokens[str(number)] for number in range(len(PROMPTS))] == expected


def test_a_graph_that_a_rank_lacks_is_an_error() -> None:
    """vLLM and SGLang let each rank choose its graph; a rank that chooses another one waits for ever."""
    graphs = GraphedDecodes.__new__(GraphedDecodes)
    graphs._graphs, graphs._verifications, graphs._slots = {}, {}, None

    class Step:
        adapters = ()

    with pytest.raises(RuntimeError, match="rank 0 replays a CUDA graph of 4 rows, which this rank has not recorded"):
        graphs.replay(Choice(4), Step())  # type: ignore[arg-type]  # the part that is read


# A rank that ends or hangs


def test_an_agreement_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "AGREEMENT", timedelta(seconds=0.5))
    alone = Group(0, 2, torch.device("cpu"), file_store(tmp_path))
    with pytest.raises(TimeoutError, match=r"rank 1 of 2 has not said within 0 s whether it could go on"):
        alone.agree("")


@pytest.fixture
def leader(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Rank 0 of two, in a process of its own, which waits for rank 1 to have recorded."""
    script = "from tests.worker.parallel.test_graphs import wait_for_rank_1; wait_for_rank_1()"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def wait_for_rank_1() -> None:
    """Be rank 0: start rank 1, and wait for its agreement. Print the process of rank 1 as soon as both have joined, and why this ends."""
    from fairlead_worker.config import WorkerConfig

    class Outbox:
        def send(self, message: object) -> None:
            print(json.dumps({"reason": getattr(message, "reason", "")}), flush=True)

    ranks = ranks_module.Ranks(WorkerConfig(model="file:///none", tensor_parallel_size=2, threads=1), Outbox())
    group = ranks.join()
    (process,) = ranks._processes._processes.values()
    print(json.dumps({"rank 1": process.pid}), flush=True)
    group.agree("")


def read(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Return the next line of the process, within the deadline."""
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.append(process.stdout.readline()), daemon=True)  # type: ignore[union-attr]  # it has one
    reader.start()
    reader.join(DEADLINE)
    assert lines and lines[0], "no line in time"
    found: dict[str, Any] = json.loads(lines[0])
    return found


def test_a_rank_that_is_killed_while_it_records_ends_the_others_with_the_reason(leader: "subprocess.Popen[str]") -> None:
    """Rank 0 waits for its agreement, in a call that no signal interrupts."""
    os.kill(read(leader)["rank 1"], signal.SIGKILL)
    assert "rank 1 of 2 was ended by SIGKILL" in read(leader)["reason"]
    assert leader.wait(DEADLINE) == 1


def test_a_trial_that_hangs_ends_with_the_flag_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for each other in replays raise nothing: pytorch#196133."""
    ended: list[str] = []
    noticed = threading.Event()

    def on_loss(reason: str) -> None:
        ended.append(reason)
        noticed.set()

    ranks = ranks_module.Ranks.__new__(ranks_module.Ranks)
    monkeypatch.setattr(ranks, "_on_loss", on_loss)
    with ranks.limit(0.05, "set --max-cudagraph-capture-size 0"):
        assert noticed.wait(DEADLINE)
    with ranks.limit(DEADLINE, "not reached"):
        pass
    assert ended == ["set --max-cudagraph-capture-size 0"]
