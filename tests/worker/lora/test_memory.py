"""Slots of LoRA adapters: their number and size, and that their memory and that of graphs is reserved before pages are sized."""

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.worker.execution.replayed import KERNELS, PAGE, Replayed, decodes, filled_backend
from tests.worker.execution.test_piecewise import Memory as PiecesMemory
from tests.worker.lora.adapted import folders, loaded

from fairlead_worker.execution import runner_builder as runner_module
from fairlead_worker.execution.cuda_graphs.decodes import graphs_for
from fairlead_worker.execution.memory_profile import run_largest_step
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.kernels import flashinfer
from fairlead_worker.kernels.base import PackedStep, StepContext
from fairlead_worker.kernels.flashinfer import FlashInferBackend, GraphWrappers
from fairlead_worker.kernels.paging import Paging
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.lora.layers import adaptable_layers
from fairlead_worker.lora.slots import AdapterSlots
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.limits import StepLimits

__all__ = ["folders", "loaded"]
pytestmark = pytest.mark.usefixtures("quick_collections")


def test_slots_for_those_that_are_there(loaded: LoadedModel, folders: list[Path]) -> None:
    """Where none is loaded later, there are as many slots as adapters, of their rank, on their layers."""
    adapters = AdapterSet(loaded, 8, 64, growing=False)
    adapters.allocate_slots()
    assert adapters.slots is None, "there are no adapters"
    for number in (1, 2):
        adapters.load(number, str(number), "file:///a", folders[number])
    before = hooked_logits(loaded, adapters)
    adapters.allocate_slots()
    layers = {"q_proj", "down_proj", "v_proj", "gate_proj", "o_proj"}
    sizes = [size for path, size in adaptable_layers(loaded.model).items() if path.rpartition(".")[2] in layers]
    assert adapters.slots is not None
    assert adapters.slots.bytes == sum(2 * 8 * 2 * (inputs + outputs) for inputs, outputs in sizes)
    assert adapters.slots.of([2, 0, 1]) == [2, 0, 1]
    assert torch.equal(hooked_logits(loaded, adapters), before), "the hooks read the slots now"
    for number in (1, 2):
        adapters.unload(number)


@torch.inference_mode()
def hooked_logits(loaded: LoadedModel, adapters: AdapterSet) -> torch.Tensor:
    return ModelRunner(loaded, filled_backend(loaded), adapters=adapters).run(decodes(4, 1, [1, 2, 0, 1]))


def test_adapters_are_in_the_step_that_memory_is_measured_with(loaded: LoadedModel, folders: list[Path]) -> None:
    """One that is on all layers, whether any is loaded or not; where none can be, none is."""
    assert touched(loaded, AdapterSet(loaded, 3, 8)) == len(adaptable_layers(loaded.model)) == 14
    fixed = AdapterSet(loaded, 3, 8, growing=False)
    assert touched(loaded, fixed) == 0
    fixed.load(1, "a", "file:///a", folders[3])
    assert touched(loaded, fixed) == 2, "the layers of those that are there"
    fixed.unload(1)


def touched(loaded: LoadedModel, adapters: AdapterSet) -> int:
    """Layers to whose answers something is added in the worst step, for all of its rows but one."""
    runner, layers = ModelRunner(loaded, filled_backend(loaded), adapters=adapters), 0
    run = runner.forward

    def seen(step: PackedStep, context: StepContext) -> torch.Tensor:
        nonlocal layers
        assert list(step.adapters) == ([0, *[number] * (len(step.starts) - 1)] if number else [])
        layers = sum(number in layer.deltas for layer in adapters._layers.values())
        return run(step, context)

    runner.forward = seen  # type: ignore[assignment]  # looks
    with torch.inference_mode(), adapters.profile_adapter() as number:
        run_largest_step(StepLimits(8, 2, 16), PAGE, runner.logits, number)
    assert not any(-1 in layer.deltas for layer in adapters._layers.values()), "it is gone again"
    return layers


def test_a_runner_is_made_with_slots_and_graphs(loaded: LoadedModel, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where decodes can be graphs adapters have slots; on attention that has no graphs they take no memory for them."""
    recorder = Replayed()
    monkeypatch.setattr(flashinfer, "library", lambda: KERNELS)
    monkeypatch.setattr(runner_module, "graphs_for", partial(graphs_for, recorder=recorder))
    adapters = AdapterSet(loaded, 2, 8)
    made = RunnerBuilder(loaded=loaded, page_size=PAGE, backend="flashinfer", kv_pages=40, adapters=adapters, graph_rows=4).build()
    assert recorder.recorded == [4, 4, 2, 2, 1, 1]
    adapters.load(1, "a", "file:///a", folders[0])
    with torch.inference_mode():
        made.run(decodes(3, 1, [1, 0, 1]))
    assert recorder.replays == [0]
    adapters.unload(1)
    without = AdapterSet(loaded, 2, 8)
    assert (
        RunnerBuilder(loaded=loaded, page_size=PAGE, backend="reference", kv_pages=40, adapters=without, graph_rows=4).build().graphs
        is None
    )
    assert without.slots is None


@pytest.mark.parametrize(
    ("method", "rows"), [({}, 4), ({"speculative_method": "ngram", "speculative_num_tokens": 3}, 16)], ids=["plain", "guesses"]
)
def test_graphs_are_as_large_as_steps_of_decodes(
    loaded: LoadedModel, method: dict[str, object], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess is a row, and a request has several."""
    recorder = Replayed()
    monkeypatch.setattr(flashinfer, "library", lambda: KERNELS)
    monkeypatch.setattr(runner_module, "graphs_for", partial(graphs_for, recorder=recorder))
    steps = SchedulerConfig(loaded.max_model_len, max_num_seqs=4, **method)  # type: ignore[arg-type]  # each its field's type
    RunnerBuilder(loaded=loaded, page_size=PAGE, backend="flashinfer", kv_pages=40, steps=steps, graph_rows=256).build()
    assert max(recorder.recorded) == rows


class Memory(PiecesMemory):
    """A device that holds slots of adapters too."""

    def __init__(self, adapters: AdapterSet) -> None:
        super().__init__()
        self._adapters = adapters

    def free(self) -> int:
        return super().free() - (self._adapters.slots.bytes if self._adapters.slots else 0)


@pytest.mark.parametrize("growing", [True, False], ids=["loaded at run time", "none"])
def test_slots_and_graphs_have_their_memory_before_pages_do(growing: bool, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = AdapterSet(loaded, 2, 8, growing=growing)
    memory = Memory(adapters)
    monkeypatch.setattr(flashinfer, "library", lambda: KERNELS)
    monkeypatch.setattr(runner_module, "graphs_for", partial(graphs_for, recorder=memory))
    steps = SchedulerConfig(64, max_num_seqs=4, chunked_prefill_size=16)
    made = RunnerBuilder(
        loaded=loaded,
        page_size=PAGE,
        backend="flashinfer",
        adapters=adapters,
        steps=steps,
        graph_rows=2,
        mem_fraction_static=1.0,
        memory=memory,
    ).build()
    kinds = 2 if growing else 1
    assert memory.recorder.recorded == [2] * kinds + [1] * kinds + [2] * kinds + [1] * kinds, "measured, given back, made"
    assert memory.graphs == 2 * kinds
    slots = 0 if adapters.slots is None else adapters.slots.bytes
    assert bool(slots) is growing and made.step_tokens == 20
    room = (16 << 20) - (1 << 20) - slots - memory.graphs * memory.graph_bytes
    assert made.backend.pages == room // made.backend.spec.page_bytes


def test_a_failed_capture_with_adapters_is_not_repeated_after_the_profile(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failed capture costs time, and memory in some releases of torch. The graphs without adapters stay."""
    adapters = AdapterSet(loaded, 2, 8)
    memory, tried = Memory(adapters), list[int]()

    def fail(self: AdapterSlots, slots: torch.Tensor) -> AbstractContextManager[None]:
        tried.append(len(slots))
        raise RuntimeError("CUDA error: not permitted\nand advice") from ValueError("a hook failed")

    monkeypatch.setattr(AdapterSlots, "activate", fail)
    monkeypatch.setattr(flashinfer, "library", lambda: KERNELS)
    monkeypatch.setattr(runner_module, "graphs_for", partial(graphs_for, recorder=memory))
    steps = SchedulerConfig(64, max_num_seqs=4, chunked_prefill_size=16)
    made = RunnerBuilder(
        loaded=loaded,
        page_size=PAGE,
        backend="flashinfer",
        adapters=adapters,
        steps=steps,
        graph_rows=2,
        mem_fraction_static=1.0,
        memory=memory,
    ).build()
    assert tried == [2] and memory.recorder.recorded == [2, 1, 2, 1]
    assert made.graphs is not None and made.graphs.is_recorded
    failed = "RuntimeError: CUDA error: not permitted, after ValueError: a hook failed"
    assert made.graph_failure == f"a step of 2 decodes with LoRA adapters cannot be recorded: {failed}"


def test_a_failed_capture_of_joined_rows_is_not_repeated_after_the_profile(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with adapters. Drafted tokens are rows of their own then."""
    memory, tried = Memory(AdapterSet(loaded, 2, 8)), list[int]()
    make = FlashInferBackend.graph_wrappers

    def fail(self: FlashInferBackend, paging: Paging) -> GraphWrappers:
        if not paging.single:
            tried.append(len(paging.last_page_len))
            raise RuntimeError("CUDA error: not permitted")
        return make(self, paging)

    monkeypatch.setattr(FlashInferBackend, "graph_wrappers", fail)
    monkeypatch.setattr(flashinfer, "library", lambda: KERNELS)
    monkeypatch.setattr(runner_module, "graphs_for", partial(graphs_for, recorder=memory))
    steps = SchedulerConfig(64, max_num_seqs=4, chunked_prefill_size=16, speculative_method="ngram")
    made = RunnerBuilder(
        loaded=loaded, page_size=PAGE, backend="flashinfer", steps=steps, graph_rows=2, mem_fraction_static=1.0, memory=memory
    ).build()
    assert tried == [2] and memory.recorder.recorded == [2, 1, 2, 1]
    assert made.graphs is not None and made.graphs.is_recorded
    assert made.graph_failure == "a step of 2 drafted tokens cannot be recorded: RuntimeError: CUDA error: not permitted"


def test_those_that_may_come_have_their_memory_where_no_slots_are_kept(loaded: LoadedModel, folders: list[Path]) -> None:
    """Else they would take that of the largest step, when pages have all the rest."""
    adapters = AdapterSet(loaded, 3, 8)
    adapters.load(1, "a", "file:///a", folders[0])
    steps = SchedulerConfig(64, max_num_seqs=4, chunked_prefill_size=16)
    made = RunnerBuilder(
        loaded=loaded, page_size=PAGE, adapters=adapters, steps=steps, mem_fraction_static=1.0, memory=Memory(adapters)
    ).build()
    values = sum(8 * (inputs + outputs) for inputs, outputs in adaptable_layers(loaded.model).values())
    room = (16 << 20) - (1 << 20) - 2 * values * loaded.dtype.itemsize
    assert adapters.slots is None and made.backend.pages == room // made.backend.spec.page_bytes
    adapters.unload(1)
    assert AdapterSet(loaded, 3, 8, growing=False).pending_bytes() == 0
