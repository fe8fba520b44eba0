"""The steps of the engine process, without the process."""

import gc
import shutil
from array import array
from pathlib import Path

import pytest
import torch
from tests.models import save_model

from fairlead.random_model.build import make_model
from fairlead_worker.build import chunk_seconds, graph_rows
from fairlead_worker.config import WorkerConfig
from fairlead_worker.engine_process import run
from fairlead_worker.execution import trial
from fairlead_worker.execution.forward import Forward, LayerForward, ModuleForward
from fairlead_worker.execution.native_forward import NativeForward
from fairlead_worker.execution.overlap import LaunchedStep, OverlappedRunner
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.ipc.messages import Failed, FromEngine, Load, Loading, Ready, Sampling, Step, StepModes, Stop, Submit, ToEngine
from fairlead_worker.kernels.base import PackedStep, StepContext
from fairlead_worker.scheduler.plan import StepPlan

NO_GRAPHS = "off: no CUDA graphs with a CPU"


class End:
    """Sends `Stop` at the first receive, and records the state when the engine is ready."""

    def __init__(self) -> None:
        self.ready: Ready | None = None
        self.frozen = 0

    def receive(self, timeout: float | None) -> list[ToEngine]:
        return [Stop()]

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            self.ready, self.frozen = message, gc.get_freeze_count()


def test_collections_do_not_walk_what_the_load_has_made(model: Path) -> None:
    end = End()
    try:
        assert run(WorkerConfig(model=f"file://{model}", kv_pages=8, threads=1), end) == 0
    finally:
        gc.unfreeze()
    assert end.ready is not None and end.ready.pages == 8
    assert end.frozen > 10_000


class Refused:
    """Records why the engine fails."""

    def __init__(self) -> None:
        self.reason, self.is_warming_up = "", False

    def receive(self, timeout: float | None) -> list[ToEngine]:
        raise AssertionError("the engine serves")

    def send(self, message: FromEngine) -> None:
        assert not isinstance(message, Ready)
        self.is_warming_up |= isinstance(message, Loading) and message.phase == "warmup"
        if isinstance(message, Failed):
            self.reason = message.reason


class Asking:
    """Submits one request at each receive, and sends `Stop` when all have ended."""

    def __init__(self, requests: list[Submit]) -> None:
        self.left, self.open = list(requests), {request.id for request in requests}
        self.tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        self.ready: Ready | None = None
        self.loading: list[Loading] = []
        self.first_load: Load | None = None
        """Before the first step."""
        self.stored_before_first_output = 0

    def receive(self, timeout: float | None) -> list[ToEngine]:
        if self.first_load is None:
            return []
        if self.left:
            return [self.left.pop(0)]
        return [] if self.open else [Stop()]

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            self.ready = message
        if isinstance(message, Loading):
            self.loading.append(message)
        if isinstance(message, Step) and self.first_load is None:
            self.first_load, self.stored_before_first_output = message.load, len(message.events)
        for output in message.each() if isinstance(message, Step) else ():
            self.tokens[output.id] += array("I", output.tokens)
            self.open -= {output.id} if output.finish else set()


def requests() -> list[Submit]:
    """Greedy and sampled requests with shared prefixes and various lengths."""
    made = []
    for number in range(6):
        prompt = array("I", [*range(100, 140), number + 1] * (1 + number % 2))
        sampling = Sampling(max_tokens=5 + 4 * number, temperature=float(number % 3 == 2), seed=number, ignore_eos=True)
        made.append(Submit(str(number), prompt.tobytes(), sampling, 1))
    return made


def generate(model: Path, **flags: object) -> dict[str, list[int]]:
    """Return each request's tokens, from an engine with these flags."""
    end = Asking(requests())
    config = WorkerConfig.model_validate({"model": f"file://{model}", "kv_pages": 64, "threads": 1, "dtype": "float32"} | flags)
    try:
        assert run(config, end) == 0
    finally:
        gc.unfreeze()
    return end.tokens


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    return generate(model)


@pytest.mark.parametrize(
    ("ahead", "flags"),
    [
        (True, {"deterministic": True}),
        (True, {"max_cudagraph_capture_size": 8, "attention_backend": "reference"}),
        (False, {"speculative_config": {"method": "ngram"}}),
    ],
    ids=["deterministic", "graphs", "speculation"],
)
def test_steps_launched_ahead_change_no_token(
    model: Path,
    expected: dict[str, list[int]],
    ahead: bool,
    flags: dict[str, object],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Speculation needs each step's tokens first, so it uses the plain loop and logs that."""
    launched = collect_launched(monkeypatch)
    assert {name: len(tokens) for name, tokens in expected.items()} == {str(number): 5 + 4 * number for number in range(6)}
    assert generate(model, overlap="on", **flags) == expected
    assert (len(launched) > 10) == ahead
    told = "--overlap on is ignored: each step is read before the next one is planned with --speculative-config"
    assert (told in caplog.text) != ahead


@pytest.mark.parametrize("arch", ["gemma3", "mistral"])
def test_a_cache_by_groups_changes_no_token(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps launched ahead and without, and beside a host tier, which a CPU ignores."""
    windowed = make_model(tmp_path / arch, arch, vocab=1024, layers=6, sliding_window=16)
    launched, ready = collect_launched(monkeypatch), list[Ready]()
    monkeypatch.setattr(
        Asking, "send", lambda end, message, send=Asking.send: (isinstance(message, Ready) and ready.append(message), send(end, message))
    )
    tokens = generate(windowed, host_kv_cache_bytes=1 << 20)
    assert generate(windowed) == tokens and not launched
    assert generate(windowed, overlap="on") == tokens and len(launched) > 10
    assert all(each.kv_groups.endswith("the last 16 tokens") and each.pages == 64 and each.max_model_len > 64 * 16 for each in ready)


def collect_launched(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Collect the plans of requests that are launched ahead."""
    launched: list[StepPlan] = []
    launch = OverlappedRunner.launch

    def collect(self: OverlappedRunner, plan: StepPlan) -> LaunchedStep:
        launched.append(plan)
        return launch(self, plan)

    monkeypatch.setattr(OverlappedRunner, "launch", collect)
    return launched


def test_the_start_leaves_nothing_behind(model: Path, expected: dict[str, list[int]]) -> None:
    """The engine tells what it uses, and its cache and counters begin empty."""
    end = Asking(requests())
    config = WorkerConfig.model_validate({"model": f"file://{model}", "kv_pages": 64, "threads": 1, "dtype": "float32", "overlap": "on"})
    try:
        assert run(config, end) == 0
    finally:
        gc.unfreeze()
    assert end.tokens == expected
    assert end.ready is not None and end.ready.modes == StepModes(NO_GRAPHS, "on", piecewise_graphs=NO_GRAPHS)
    assert "trial" not in [message.phase for message in end.loading], "there are no graphs to try"
    assert end.first_load is not None and end.first_load.pages_cached == 0 and end.first_load.pages_free == 64
    assert end.first_load.prompt_tokens == end.first_load.steps == 0 and not end.stored_before_first_output


def test_on_a_cpu_nothing_is_tried_by_default(model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(trial, "_guard", lambda *_: pytest.fail("a trial"))
    end = Asking(requests()[:1])
    try:
        assert run(WorkerConfig(model=f"file://{model}", kv_pages=64, threads=1), end) == 0
    finally:
        gc.unfreeze()
    assert end.ready is not None
    assert end.ready.modes == StepModes(NO_GRAPHS, "off: nothing to gain on a CPU", piecewise_graphs=NO_GRAPHS)
    assert "ignored" not in caplog.text, "the user has set nothing"


@pytest.mark.parametrize("is_decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("forward", [NativeForward, LayerForward, ModuleForward], ids=["native", "layers", "transformers"])
def test_a_model_whose_first_step_fails_is_not_ready(
    model: Path, forward: type, is_decode: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers passed each comparison of the load, as those of a family whose own code reads a weight that is packed."""
    compute, end, failed = forward.__call__, Refused(), list[PackedStep]()

    def fail(self: Forward, step: PackedStep, context: StepContext) -> torch.Tensor:
        if end.is_warming_up and (step.counts == [1]) == is_decode:
            failed.append(step)
            raise AttributeError("'PackedLinear' object has no attribute 'weight'")
        return compute(self, step, context)

    monkeypatch.setattr(forward, "__call__", fail)
    folder = shutil.copytree(model, tmp_path / "model")
    if forward is ModuleForward:
        save_model("hunyuan_v1_moe", folder, vocab_size=1024)
    config = WorkerConfig(model=f"file://{folder}", kv_pages=8, threads=1, native_decoder=forward is NativeForward)
    assert run(config, end) == 1
    assert len(failed) == 1, "this path computed the step"
    error = "AttributeError: 'PackedLinear' object has no attribute 'weight'"
    assert end.reason == f"cannot load model file://{folder}: a step of the warm-up failed: {error}"


@pytest.mark.parametrize(
    ("device", "generates", "flags", "seconds"),
    [
        ("cuda", True, {}, 0.5),
        ("cuda", True, {"itl_target_ms": 40}, 0.04),
        ("cuda", True, {"chunked_prefill_size": 2048}, 0),
        ("cuda", True, {"chunked_prefill_size": -1}, 0),
        ("cuda", True, {"kv_pages": 100}, 0),
        ("cuda", True, {"kv_cache_memory_bytes": 1 << 30}, 0),
        ("cuda", False, {}, 0),
        ("cpu", True, {}, 0),
    ],
)
def test_a_chunk_is_measured_on_a_gpu_unless_its_size_or_that_of_the_kv_is_given(
    device: str, generates: bool, flags: dict[str, object], seconds: float
) -> None:
    config = WorkerConfig.model_validate({"model": "file:///model", **flags})
    assert chunk_seconds(config, device, generates) == seconds


@pytest.mark.parametrize(("given", "measured", "chunk"), [(0, 0, 512), (0, 1536, 1536), (64, 0, 64), (-1, 0, -1)])
def test_the_engine_tells_the_size_of_its_chunks(
    model: Path, given: int, measured: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`measured`: by the runner, on a GPU."""
    end, build = End(), RunnerBuilder.build

    def build_measured(self: RunnerBuilder) -> ModelRunner:
        runner = build(self)
        runner.chunk_tokens = measured
        return runner

    monkeypatch.setattr(RunnerBuilder, "build", build_measured)
    try:
        assert run(WorkerConfig(model=f"file://{model}", kv_pages=8, threads=1, chunked_prefill_size=given), end) == 0
    finally:
        gc.unfreeze()
    assert end.ready is not None and end.ready.chunked_prefill_size == chunk


@pytest.mark.parametrize(
    ("device", "flags", "rows", "why"),
    [
        ("cuda", {}, 8, ""),
        ("cuda", {"tensor_parallel_size": 2}, 8, ""),
        ("cuda", {"deterministic": True}, 0, "--deterministic"),
        ("cpu", {}, 0, "a CPU"),
    ],
)
def test_graphs_that_cannot_be_are_said_once(
    model: Path, device: str, flags: dict[str, object], rows: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A log line says why requested CUDA graphs are not used, on rank 0 only."""
    config = WorkerConfig(model=f"file://{model}", max_cudagraph_capture_size=8, **flags)  # type: ignore[arg-type]  # of the fields' types
    assert graph_rows(config, device, log_reason=False) == rows and not caplog.text
    assert graph_rows(config, device) == rows
    assert ("--max-cudagraph-capture-size 8 is ignored" in caplog.text) == bool(why) and why in caplog.text
