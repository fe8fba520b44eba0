"""A CUDA graph that cannot be captured costs the graphs and nothing else, on every torch that the worker accepts.

`FakeCuda` has the states of torch's allocator and streams that a capture changes: as in 2.11, where a failed `capture_end` leaves all of
them (pytorch#180395), and as in later releases.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.worker.execution.replayed import decodes, filled_backend

from fairlead.random_model import make_model
from fairlead_worker.execution.graphs import CudaRecorder, GraphedDecodes
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.kernels.base import PackedStep, StepContext
from fairlead_worker.model.loader import LoadedModel, load_model


class FakeStream:
    device_index = 0

    def wait_stream(self, other: "FakeStream") -> None: ...


class FakeCuda:
    """The part of torch.cuda that `CudaRecorder` uses. `cleans_up`: as releases with pytorch#180395."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cleans_up: bool) -> None:
        self.cleans_up = cleans_up
        self.current = self.default = FakeStream()
        self.pools = 0
        self.allocating_to: list[int] = []
        """Pools with a capture underway."""
        self.is_invalid = False
        """A call that is not permitted was made during the capture."""
        self.captures = 0
        replaced = {"graph_pool_handle": self._pool, "Stream": FakeStream, "current_stream": lambda: self.current}
        replaced |= {"set_stream": self._set_stream, "stream": self._stream, "graph": self._graph, "empty_cache": self.empty_cache}
        for name, part in (replaced | {"CUDAGraph": lambda: SimpleNamespace(replay=lambda: None)}).items():
            monkeypatch.setattr(torch.cuda, name, part)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end_allocate, raising=False)

    def empty_cache(self) -> None:
        assert not self.allocating_to, "captures_underway.empty() INTERNAL ASSERT FAILED"

    def wait(self) -> None:
        """Make a call that waits for the device, which a capture does not permit."""
        if self.allocating_to:
            self.is_invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def _pool(self) -> int:
        self.pools += 1
        return self.pools

    def _set_stream(self, stream: FakeStream) -> None:
        self.current = stream

    @contextmanager
    def _stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def _graph(self, graph: object, pool: int, stream: FakeStream) -> Iterator[None]:
        if pool in self.allocating_to:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        before, self.current = self.current, stream
        self.allocating_to.append(pool)
        self.captures += 1
        failed = True
        try:
            yield
            failed = False
        finally:
            invalid, self.is_invalid = self.is_invalid, False
            if self.cleans_up or not invalid:
                self.allocating_to.remove(pool)
                self.current = before
            if invalid:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        assert not failed

    def _end_allocate(self, device: int, pool: int) -> None:
        if pool not in self.allocating_to:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating_to.remove(pool)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("captures") / "llama"
    make_model(folder, arch="llama", hidden=128, heads=2, kv_heads=1, head_dim=64, layers=1, vocab=500)
    return load_model(str(folder), dtype="float16")


@pytest.mark.parametrize("cleans_up", [False, True], ids=["torch 2.11", "later"])
@pytest.mark.parametrize("fails_at", [1, 2, 4], ids=lambda number: f"capture {number}")
def test_a_failed_capture_falls_back_and_serves(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cleans_up: bool, fails_at: int
) -> None:
    cuda, runner = FakeCuda(monkeypatch, cleans_up), ModelRunner(loaded, filled_backend(loaded))
    run = runner.forward

    def forward(step: PackedStep, context: StepContext) -> torch.Tensor:
        if cuda.captures == fails_at:
            cuda.wait()
        return run(step, context)

    graphs = GraphedDecodes(forward, runner.backend, 8, 100, CudaRecorder())  # type: ignore[arg-type]  # a call is all of it
    graphs.capture()
    assert "decodes run without CUDA graphs" in caplog.text and not graphs.is_recorded
    torch.cuda.empty_cache()
    assert cuda.current is cuda.default, "the next forward pass runs on the stream of all others"
    runner.graphs = graphs
    with torch.inference_mode():
        assert runner.run(decodes(3, 1)).shape == (3, 500)


@pytest.mark.parametrize("cleans_up", [False, True], ids=["torch 2.11", "later"])
def test_a_recorder_records_after_a_failure(monkeypatch: pytest.MonkeyPatch, cleans_up: bool) -> None:
    """Graphs with adapters fail first, and those without are recorded."""
    cuda = FakeCuda(monkeypatch, cleans_up)
    recorder = CudaRecorder()

    def fail() -> torch.Tensor:
        cuda.wait()
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="previous error during capture"):
        recorder.record(fail)
    run: Callable[[], torch.Tensor] = lambda: torch.ones(1)  # noqa: E731
    assert recorder.record(run)().item() == 1 and not cuda.allocating_to
