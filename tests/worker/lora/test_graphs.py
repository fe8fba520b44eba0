"""Decodes with LoRA adapters as graphs: a replay adds what the layers' hooks add, for any mixture of adapters among its rows.

Graphs repeat their calls on the same memory, as in `test_graphs.py`; adapters come and go between them, and nothing is recorded again.
"""

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from bench.gpu.models.adapters import write_adapter
from tests.worker.execution.replayed import PAGE, Replayed, decodes, filled_backend
from tests.worker.lora.adapted import TOLERANCE, World, folders, loaded, world
from tests.worker.streams import Late, Thread

from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.engine.overlap import run_overlapped
from fairlead_worker.errors import AdapterError
from fairlead_worker.execution.cuda_graphs.decodes import graphs_for
from fairlead_worker.execution.overlap import OverlappedRunner
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.stream import Stream
from fairlead_worker.ipc.messages import (
    AdapterChanged,
    Failed,
    FromEngine,
    LoadAdapter,
    Sampling,
    Step,
    Stop,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from fairlead_worker.kernels.base import PackedStep
from fairlead_worker.lora.files import Pair
from fairlead_worker.lora.slots import AdapterSlots
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.scheduler import Scheduler

__all__ = ["folders", "loaded", "world"]


def test_any_mixture_of_adapters_is_replayed(world: World) -> None:
    """Different ranks, different layers, rows without an adapter, batches that are filled up."""
    for number in (1, 2, 3):
        world.load(number, number - 1)
    for seed, mixture in enumerate(([1, 2, 3, 0], [0, 0, 2], [3], [1] * 12, [2, 1, 0, 3, 3, 0, 1], [0, 3, 0, 0, 0, 0, 0, 0, 1])):
        world.check(decodes(len(mixture), seed, mixture))
    plain, adapted = decodes(4, 0), decodes(4, 0, [1, 2, 3, 0])
    without, with_ = world.replay(plain), world.replay(adapted)
    assert ((without - with_).abs().amax(1) > 5 * TOLERANCE).tolist() == [True, True, True, False], "adapters change what is said"


def test_adapters_come_and_go_and_nothing_is_recorded_again(world: World) -> None:
    recorded = list(world.recorder.recorded)
    assert recorded == [12, 12, 8, 8, 4, 4, 2, 2, 1, 1], "with adapters and without, the largest first"
    world.load(1, 0)
    world.check(decodes(3, 1, [1, 0, 1]))
    world.load(2, 1)
    world.load(3, 2)
    world.check(decodes(5, 2, [1, 2, 3, 0, 2]))
    world.adapters.unload(1)  # all layers, rank 4; the next adapter in its slot has one layer, and rank 1
    world.load(4, 3)
    world.check(decodes(5, 3, [4, 2, 3, 0, 4]))
    world.adapters.unload(2)
    world.adapters.unload(4)
    world.load(5, 0)
    world.load(6, 2)
    world.check(decodes(6, 4, [6, 5, 3, 0, 5, 3]))
    assert world.recorder.recorded == recorded


def test_a_step_without_adapters_pays_nothing_for_them(world: World, loaded: LoadedModel) -> None:
    """Its graph has the operations that it has where no adapters are served."""
    world.load(1, 0)
    for adapters, kind in (((), 1), ([0, 1], 0), ((), 1)):
        world.replay(decodes(2, 1, adapters))
        assert world.recorder.replays.pop() % 2 == kind, "each size: first with adapters, then without"
    alone, recorder = ModelRunner(loaded, filled_backend(loaded)), Replayed()
    graphs = graphs_for(alone.forward, alone.backend, 12, 100, recorder)
    assert graphs is not None
    graphs.capture()
    assert world.recorder.operations[1::2] == recorder.operations
    assert world.recorder.operations[0] > recorder.operations[0]


def test_a_rows_bits_do_not_depend_on_its_company(world: World) -> None:
    """In a graph of one size a row has the same bits beside any rows with any adapters."""
    for number in (1, 2, 3):
        world.load(number, number - 1)
    alone = world.replay(decodes(8, 5, [2, 0, 0, 0, 0, 0, 0, 0]))[0]
    for company in ([1, 3, 0, 1, 2, 3, 2], [3] * 7, [2] * 7):
        assert torch.equal(world.replay(decodes(8, 5, [2, *company]))[0], alone)
    world.adapters.unload(3)
    world.load(4, 0)
    assert torch.equal(world.replay(decodes(8, 5, [2, 4, 1, 4, 0, 4, 4, 4]))[0], alone)


def test_an_adapter_without_a_slot_runs_without_a_graph(world: World, loaded: LoadedModel, tmp_path: Path) -> None:
    assert world.adapters.slots is not None and world.graphed.graphs is not None
    assert world.adapters.slots.of([0, 9]) is None
    assert world.graphed.graphs.run(decodes(2, 1, [0, 9])) is None
    world.load(1, 0)
    assert world.graphed.graphs.run(decodes(2, 1, [0, 1])) is not None


def test_an_adapter_that_cannot_be_loaded_leaves_its_slot(world: World, loaded: LoadedModel, tmp_path: Path) -> None:
    for number in range(1, 8):
        broken = write_adapter(loaded, tmp_path / str(number), 1, rank=8, scale=1e30)
        with pytest.raises(AdapterError, match="finite"):
            world.adapters.load(number, "broken", "file:///b", broken)
    for number in (1, 2, 3):
        world.load(number, 1)
    world.check(decodes(3, 1, [1, 2, 3]))


@pytest.mark.parametrize("slots", [2, 40], ids=["multiplied whole", "gathered"])
def test_what_a_layer_adds(slots: int) -> None:
    """In float32, against the sum by its definition. One slot has numbers that overflow: no other row is affected."""
    drawn = torch.Generator().manual_seed(1)
    layer = torch.nn.Linear(24, 40)
    stacked = AdapterSlots({"layer": (layer, (24, 40))}, slots, 8, torch.float32, torch.device("cpu"))
    pairs = {
        number: Pair(torch.randn(rank, 24, generator=drawn), torch.randn(40, rank, generator=drawn)) for number, rank in ((5, 3), (7, 8))
    }
    pairs[7] = Pair(pairs[7].down, pairs[7].up * 1e38)
    inputs = torch.randn(1, 6, 24, generator=drawn)
    with torch.inference_mode():
        for number, pair in pairs.items():
            assert stacked.put(number, {"layer": pair})
        mixture = [5, 0, 7, 5, 0, 0]
        places = stacked.of(mixture)
        assert places == [1, 0, 2, 1, 0, 0]
        plain = layer(inputs)
        with stacked.activate(torch.tensor(places)):
            answer = layer(inputs)
        assert torch.equal(layer(inputs), plain), "no hook is left"
    for row, number in enumerate(mixture):
        own = pairs[number].up @ (pairs[number].down @ inputs[0, row]) if number else torch.zeros(40)
        if number == 7:
            assert not answer[0, row].isfinite().all()
        else:
            torch.testing.assert_close(answer[0, row] - plain[0, row], own, rtol=1e-5, atol=1e-5)


class Service:
    """What comes in and goes out: requests of two adapters and of none, then one adapter goes, and another has its slot beside the rest."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._messages: list[ToEngine] = [self._load(1, folders[0]), self._load(2, folders[1])]
        self._messages += [self._submit(name, adapter, 5 if adapter == 1 else 30) for name, adapter in enumerate((1, 2, 0, 1, 2))]
        self._later: list[ToEngine] = [UnloadAdapter(1), self._load(3, folders[2]), self._submit(5, 3, 12), self._submit(6, 2, 12)]
        self.running = {str(number) for number in range(7)}
        self.changed: list[AdapterChanged] = []

    @staticmethod
    def _load(number: int, folder: Path) -> LoadAdapter:
        return LoadAdapter(number, f"a{number}", "file:///a", str(folder))

    @staticmethod
    def _submit(name: int, adapter: int, tokens: int) -> Submit:
        prompt = array("I", [7 + name, 50, 90 + adapter]).tobytes()
        return Submit(str(name), prompt, Sampling(max_tokens=tokens, temperature=0, ignore_eos=True), adapter, adapter=adapter)

    def receive(self, timeout: float) -> list[ToEngine]:
        messages, self._messages = self._messages, []
        if not self.running & {"0", "3"}:
            messages, self._later = messages + self._later, []
        return messages if self.running else [Stop()]

    def send(self, message: FromEngine) -> None:
        assert not isinstance(message, Failed), message
        if isinstance(message, AdapterChanged):
            self.changed.append(message)
        if isinstance(message, Step):
            self.running -= {output.id for output in message.each() if output.finish}


@pytest.mark.parametrize("lane", [Thread, Late])
def test_adapters_change_under_steps_launched_ahead(world: World, lane: Callable[[], Stream]) -> None:
    """Every replay of the overlapped loop says what the layers' hooks say of the same step at that moment."""
    runner, backend = world.graphed, world.graphed.backend
    assert runner.graphs is not None
    run, mixtures = runner.graphs.run, set[tuple[int, ...]]()

    def compared(step: PackedStep) -> torch.Tensor | None:
        logits = run(step)
        if logits is not None:
            logits = logits.clone()
            mixtures.add(tuple(step.adapters))
            torch.testing.assert_close(logits, runner.forward(step, backend.plan(step)), rtol=0, atol=TOLERANCE)
        return logits

    runner.graphs.run = compared  # type: ignore[method-assign]  # looks
    config = SchedulerConfig(runner.loaded.max_model_len)
    scheduler = Scheduler(config, PrefixCache(PagePool(backend.pages, PAGE), 2 * PAGE, extend))
    service = Service(world.folders)
    assert run_overlapped(scheduler, OverlappedRunner(runner, lane()), service, adapters=world.adapters) == 0
    assert [change.error for change in service.changed] == [""] * 4
    assert {1, 2} < {number for mixture in mixtures for number in mixture} == {0, 1, 2, 3}
    assert any({2, 3} <= set(mixture) for mixture in mixtures), "beside each other"
