"""Profile of a step, from the profiler's events."""

from types import SimpleNamespace

import pytest
import torch
from bench.engine.step_profiler import PREFIX, STEP, WARM_UP, Account, Profiled, describe
from tests.models import save_model
from tests.worker.execution.planner import Planner, make_request

from fairlead_worker.execution.runner import ModelRunner, make_runner
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.model.loader import load_model

STEPS = 20


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    loaded = load_model(str(folder), dtype="float32")
    return make_runner(loaded, page_size=4, kv_pages=64, native_decoder=False, backend="reference")


def tokens(runner: object, outputs: int = STEPS + WARM_UP + 5) -> list[int]:
    request = make_request("a", range(2, 30), Sampling(max_tokens=outputs, temperature=0.0, ignore_eos=True))
    Planner([request], 64, 4).run(runner)  # type: ignore[arg-type]  # a runner, profiled or not
    return list(request.tokens)


def test_the_shares_add_up_and_the_runner_is_unchanged(runner: ModelRunner) -> None:
    plain, owned = tokens(runner), set(vars(runner)) | set(vars(runner.backend))
    profiled = Profiled(runner, STEPS)
    assert tokens(profiled) == plain and profiled.is_done
    found = profiled.account.report("cpu")
    assert found["steps"] == STEPS and found["device"] == "cpu"
    assert sum(found["shares"].values()) == pytest.approx(1, abs=0.02)
    assert {"attention", "GEMM", "model", "sampling", "host"} == set(found["shares"])
    assert all(0 < share < 1 for share in found["shares"].values())
    assert sum(found["host_seconds"].values()) == pytest.approx(found["step_seconds"], rel=0.02)
    assert found["between_seconds"] > 0
    assert describe(found).startswith("20 steps of ") and "GEMM" in describe(found)
    assert set(vars(runner)) | set(vars(runner.backend)) == owned, "all is as it was"
    assert not any("forward" in vars(part) for part in runner.loaded.model.modules())
    assert not profiled._window, "no events are kept"


def event(name: str, begin: float, end: float, own: float, parent: object = None, kernels: tuple[object, ...] = (), device: bool = False):
    kind = torch.autograd.DeviceType.CUDA if device else torch.autograd.DeviceType.CPU
    span = SimpleNamespace(start=begin, end=end)
    return SimpleNamespace(
        name=name,
        device_type=kind,
        time_range=span,
        cpu_time_total=end - begin,
        self_cpu_time_total=own,
        cpu_parent=parent,
        kernels=kernels,
    )


def test_kernels_are_of_their_range_else_of_their_name_and_the_rest_is_idle() -> None:
    """As the profiler gives them on a GPU: kernels hang on the operator that launched them."""
    step = event(STEP, 0, 1000, 100)
    model = event(PREFIX + "model", 0, 500, 100, step)
    attention = event(PREFIX + "attention", 0, 100, 50, model)
    launch = event("cudaLaunchKernel", 10, 60, 50, attention, (SimpleNamespace(name="merge<float>", duration=200),))
    replay = event("cudaGraphLaunch", 100, 400, 300, model, (SimpleNamespace(name="nvjet_tst_64x8", duration=300),))
    wait = event("cudaStreamSynchronize", 500, 900, 400, step)
    outside = event("aten::add", 2000, 2100, 100)
    spans = [event("merge<float>", 100, 300, 0, device=True), event("nvjet_tst_64x8", 300, 600, 0, device=True)]
    account = Account()
    account.add([step, model, attention, launch, replay, wait, outside, *spans])
    report = account.report("cuda")
    assert report["shares"] == pytest.approx({"attention": 0.2, "GEMM": 0.3, "idle": 0.5})
    assert sum(report["host_seconds"].values()) == pytest.approx(1e-3)
    assert report["host_seconds"]["waiting"] == pytest.approx(4e-4)
    assert "idle 50.0%, GEMM 30.0%, attention 20.0%" in describe(report)
    assert "the host worked 0.600 ms" in describe(report)
