"""Two ranks for tests: this process is rank 0, and the second one, started once, loads model after model.

With `Graphs` both ranks have FlashInfer interpreted, and graphs as `tests.worker.execution.replayed` has them.
"""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
import zmq
from tests.worker.exactness.harness import Engine
from tests.worker.execution.replayed import KERNELS, PAGE, Recording, Replayed, filled_backend
from tests.worker.model.fusing import TEXT
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fairlead_worker.execution.cuda_graphs.decodes import graphs_for
from fairlead_worker.execution.host import PlainHostStore
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.fuse import fuse_layers
from fairlead_worker.model.fused import sums
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.parallel.follower import RankChannel, serve
from fairlead_worker.parallel.lead import LedAdapters, lead
from fairlead_worker.parallel.messages import AdapterFetched, End, Join, LoadModel, ToRank
from fairlead_worker.parallel.ranks import Ranks
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.sharding.group import Group
from fairlead_worker.sharding.rendezvous import file_store

MAX_LORAS, MAX_LORA_RANK = 3, 16
CONTEXT = 200
REPORT_SECONDS = 60.0


@dataclass(frozen=True)
class Graphs:
    """Graphs of both ranks, and what goes wrong on one of them."""

    rows: int = 6
    verifies: bool = False
    rank: int = 1
    """The rank where something goes wrong."""
    fails: str = ""
    """Where recording fails: "warm-up" or "capture"; empty: it does not."""
    at: int = 0
    """The graph that fails, in the order of recording."""
    is_stale: bool = False
    """A replay has the positions with which it was recorded."""
    fuses: bool = False
    """Sums over ranks are fused with the norms after them."""
    lacks_sums: bool = False
    """The fused kernel cannot be compiled."""


class RankRecorder(Replayed):
    """As `CudaRecorder` of a sharded model: the run before a capture leaves the collectives out, and a capture does not communicate."""

    def __init__(self, group: Group, wanted: Graphs) -> None:
        super().__init__()
        self.fused: tuple[str, ...] = ()
        """Kinds of fused layers."""
        self._group, self._fails = group, wanted.fails if wanted.rank == group.rank else ""
        self._at = wanted.at
        self._count = -1

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self._count += 1
        fails = self._fails if self._count == self._at else ""

        def failing() -> torch.Tensor:
            output = run()
            if fails == ("capture" if isinstance(_get_current_dispatch_mode(), Recording) else "warm-up"):
                raise RuntimeError("CUDA error: planted")
            return output

        with self._group.rehearse():
            failing()
        return self.capture(lambda cut: failing())


class RecordableGroup(Group):
    """A group whose collectives are operations of a recording, which does not run them."""

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        if isinstance(recording := _get_current_dispatch_mode(), Recording):
            recording.calls.append((super()._all_reduce, (tensor,), {}, None))
        else:
            super()._all_reduce(tensor)

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if not isinstance(recording := _get_current_dispatch_mode(), Recording):
            return super()._all_gather(tensor)
        parts = [torch.zeros_like(tensor) for _ in range(self.size)]
        recording.calls.append((super()._all_gather, (tensor,), {}, parts))
        return parts


class InterpretedSums:
    """`flashinfer.comm` in plain torch: one operation of a recording."""

    def create_allreduce_fusion_workspace(self, backend: str, *sizes: Any) -> str:
        return backend

    def allreduce_fusion(
        self,
        input: torch.Tensor,
        workspace: str,
        pattern: int,
        *,
        residual_out: torch.Tensor,
        norm_out: torch.Tensor,
        residual_in: torch.Tensor,
        rms_gamma: torch.Tensor,
        rms_eps: float,
        use_oneshot: bool,
        fp32_acc: bool,
        weight_bias: float,
    ) -> torch.Tensor:
        assert workspace == "trtllm" and pattern == 1 and use_oneshot and fp32_acc
        assert all(part.is_contiguous() and part.dim() == 2 for part in (input, residual_in, residual_out, norm_out))

        def run() -> None:
            total = input.float()
            dist.all_reduce(total)
            total += residual_in.float()
            residual_out.copy_(total)
            scale = torch.rsqrt(total.square().mean(1, keepdim=True) + rms_eps)
            norm_out.copy_(total * scale * (rms_gamma.float() + weight_bias))

        if isinstance(recording := _get_current_dispatch_mode(), Recording):
            recording.calls.append((run, (), {}, None))
        else:
            run()
        return norm_out


def fuse(loaded: LoadedModel, lacks_sums: bool) -> tuple[str, ...]:
    """Fuse norms and sums over ranks, with FlashInfer interpreted."""

    def library() -> InterpretedSums:
        if lacks_sums:
            raise RuntimeError("nvcc: not found")
        return InterpretedSums()

    with patch.object(sums, "load_library", library), patch.object(sums, "unsupported", lambda group: ""):
        return fuse_layers(loaded.model, KERNELS, CONTEXT, TEXT, ("norm", "sums"))


def record_graphs(runner: ModelRunner, group: Group, pages: int, wanted: Graphs) -> RankRecorder:
    """Give `runner` FlashInfer interpreted, and the graphs that this rank can record."""
    recorder = RankRecorder(group, wanted)
    recorder.fused = fuse(runner.loaded, wanted.lacks_sums and wanted.rank == group.rank) if wanted.fuses else ()
    runner.backend = filled_backend(runner.loaded, pages)
    runner.graphs = graphs_for(runner.forward, runner.backend, wanted.rows, CONTEXT, recorder, verifies=wanted.verifies, group=group)
    assert runner.graphs is not None
    runner.graphs.capture()
    if wanted.is_stale and wanted.rank == group.rank:
        for graph in runner.graphs._graphs.values():
            pad = graph._pad
            graph._pad = lambda step, pad=pad: _without_positions(pad(step))  # type: ignore[method-assign,misc]  # a planted fault
    return recorder


def _without_positions(step: Any) -> Any:
    return dataclasses.replace(step, positions=torch.zeros_like(step.positions))


class Pair:
    """Rank 0's side, with the part of `Ranks` that leading needs."""

    adapters: LedAdapters
    """Adapters of the latest engine."""

    def __init__(self, directory: Path) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.sndtimeo = 60_000  # a dead rank reads nothing: fail instead of hanging
        self._socket.bind(f"ipc://{directory / '1'}")
        join = Join(str(directory), 1, 2, {}, 1)
        self.process = subprocess.Popen([sys.executable, "-m", "tests.worker.parallel.pair"], stdin=subprocess.PIPE, bufsize=0)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(join) + b"\n")
        self.group = RecordableGroup.join(file_store(directory), 0, 2)
        self.recorder: RankRecorder | None = None
        """Of the latest engine with graphs."""
        self._report = directory / "report.json"
        self.elsewhere: dict[int, Path] = {}
        """adapter number -> folder in which the second rank finds its files, if it differs"""

    def send(self, message: ToRank) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def fetched(self, number: int, folder: Path) -> None:
        self.send(AdapterFetched(number, str(self.elsewhere.get(number, folder))))

    @staticmethod
    def collective() -> nullcontext[None]:
        return nullcontext()

    @contextmanager
    def engine(
        self,
        model: Path,
        pages: int = 512,
        page_size: int = 16,
        host_slots: int = 0,
        quantization: str = "none",
        graphs: Graphs | None = None,
        **options: Any,
    ) -> Iterator[Engine]:
        """Return an engine whose model is split over both ranks, behind the real scheduler."""
        sizes = {"pages": pages, "page_size": page_size if graphs is None else PAGE, "host_slots": host_slots}
        recorded = {} if graphs is None else {"graphs": dataclasses.asdict(graphs), "report": str(self._report)}
        self.send(LoadModel(json.dumps(sizes | recorded | {"model": str(model), "quantization": quantization})))
        loaded = load_model(str(model), group=self.group, quantization=quantization, dtype="auto" if graphs is None else "float16")
        adapters = adapters_of(loaded, self.group)
        engine = Engine(loaded, adapters=adapters if graphs is None else None, **sizes, **options)
        if graphs is not None:
            self._report.unlink(missing_ok=True)  # the second rank has loaded with this one, and writes another at the end
            self.recorder = record_graphs(engine.runner, self.group, pages, graphs)
        ranks = cast(Ranks, self)
        self.adapters = LedAdapters(adapters, ranks)
        lead(engine.runner, ranks, self.group)
        try:
            yield engine
        finally:
            self.send(End())

    def report(self) -> dict[str, Any]:
        """Return what the second rank says of its graphs after the end of an engine."""
        until = time.monotonic() + REPORT_SECONDS
        while not self._report.exists():
            assert time.monotonic() < until, "the second rank does not end"
            time.sleep(0.02)
        found: dict[str, Any] = json.loads(self._report.read_text())
        return found

    def profiled(self, model: Path, memory: "Plenty") -> ModelRunner:
        """Return a runner whose pages fit on both ranks beside the largest step."""
        self.send(LoadModel(json.dumps({"model": str(model), "profiled": memory.total})))
        try:
            return profiled(model, self.group, memory)
        finally:
            self.send(End())

    def close(self) -> None:
        self.send(End())
        assert self.process.wait(60) == 0
        self._socket.close()
        dist.destroy_process_group()


class Plenty:
    """Implements `execution.sizing.DeviceMemory` with room for everything."""

    def __init__(self, total: int) -> None:
        self.total = total

    def free(self) -> int:
        return self.total

    def peak_of(self, run: Callable[[], None]) -> int:
        run()
        return 1 << 20


def adapters_of(loaded: LoadedModel, group: Group) -> AdapterSet:
    return AdapterSet(loaded, MAX_LORAS, MAX_LORA_RANK, group=group)


def profiled(model: Path, group: Group, memory: Plenty) -> ModelRunner:
    loaded = load_model(str(model), group=group)
    steps = SchedulerConfig(64, max_num_seqs=4, chunked_prefill_size=16)
    return RunnerBuilder(loaded=loaded, page_size=16, adapters=adapters_of(loaded, group), steps=steps, memory=memory, group=group).build()


def main() -> None:
    """The second rank."""
    torch.set_num_threads(1)
    join = msgspec.json.decode(sys.stdin.buffer.readline(), type=Join)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    ear = RankChannel(join)
    group = RecordableGroup.join(file_store(Path(join.directory)), 1, 2)
    while isinstance(message := ear.receive(), LoadModel):
        wanted = json.loads(message.folder)
        if "profiled" in wanted:
            serve(ear, profiled(wanted["model"], group, Plenty(wanted["profiled"])), group)
            continue
        if "graphs" in wanted:
            serve_graphed(ear, group, wanted)
            continue
        loaded = load_model(wanted["model"], group=group, quantization=wanted["quantization"])
        adapters = adapters_of(loaded, group)
        runner = RunnerBuilder(loaded=loaded, page_size=wanted["page_size"], kv_pages=wanted["pages"], adapters=adapters).build()
        if wanted["host_slots"]:
            runner.host = PlainHostStore(runner.backend, wanted["host_slots"])
        serve(ear, runner, group, adapters)


def serve_graphed(channel: RankChannel, group: Group, wanted: dict[str, Any]) -> None:
    """Serve with graphs, and report on them at the end."""
    loaded = load_model(wanted["model"], group=group, dtype="float16")
    adapters_of(loaded, group)
    runner = RunnerBuilder(loaded=loaded, page_size=wanted["page_size"], kv_pages=wanted["pages"]).build()
    recorder = record_graphs(runner, group, wanted["pages"], Graphs(**wanted["graphs"]))
    made = runner.graphs
    assert made is not None
    serve(channel, runner, group)
    report = {
        "failure": made.failure,
        "verification_failure": made.verification_failure,
        "recorded": made.is_recorded,
        "dropped": runner.graphs is None,
        "replays": recorder.replays,
        "fused": recorder.fused,
    }
    file = Path(wanted["report"])
    file.with_suffix(".part").write_text(json.dumps(report))
    file.with_suffix(".part").rename(file)


def _end_with_parent() -> None:
    while sys.stdin.buffer.raw.read(1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
    os._exit(0)
