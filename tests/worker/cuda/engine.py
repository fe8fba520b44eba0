"""The worker's engine on the modelled device: the real scheduler, cache, overlapped loop, runner, graphs and host tier."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bench.gpu import interpreter
from tests.worker.cuda.library import make_library
from tests.worker.cuda.machine import Failure, Machine
from tests.worker.cuda.tensors import CUDA, DeviceMode
from tests.worker.cuda.torch_cuda import modelled_device

from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.engine.overlap import Overlap
from fairlead_worker.engine.request_timer import RequestTimer
from fairlead_worker.execution import host
from fairlead_worker.execution import runner as runner_module
from fairlead_worker.execution.cuda_graphs.decodes import graphs_for
from fairlead_worker.execution.cuda_graphs.piecewise import PieceSizes, record_pieces
from fairlead_worker.execution.overlap import OverlappedRunner
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.ipc.messages import Output, Sampling, Submit
from fairlead_worker.kernels import workspace
from fairlead_worker.kernels.base import KVSpec, LayerSpec, PackedStep, StepContext
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.lora.slots import AdapterSlots
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.model.trial_text import Reference, TrialText
from fairlead_worker.sampling.fused import FusedSampler
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.overlap_scheduler import OverlapScheduler
from fairlead_worker.scheduler.plan import StepPlan, StepResult
from fairlead_worker.scheduler.scheduler import Scheduler
from fairlead_worker.scheduler.step_outputs import StepOutputs
from fairlead_worker.sharding.group import Group

PAGE, PAGES, SLOTS, GRAPH_ROWS, CONTEXT = 4, 10, 24, 2, 64
VOCABULARY, NEW_TOKENS = 128, 4
PIECES = (4, 6, 8)
"""Tokens of piecewise graphs, up to those of a step."""
LAYERS = (LayerSpec(2, 1, 64, 64, 0.125), LayerSpec(2, 1, 64, 64, 0.125))
STEM = [7, 9, 11, 13, 15, 17, 19, 21]
PROMPTS = [
    [*STEM, 30],
    [*STEM, 31, 32, 33, 34, 35],
    [50, 51, 52],
    [*STEM[:4], 60, 61, 62, 63, 64, 65, 66, 67, 68],
    [70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81],
    [*range(100, 117)],
]
"""Prompts with shared prefixes, together longer than the device has pages for."""

SAMPLING: dict[int, dict[str, Any]] = {
    1: {"temperature": 1.0, "seed": 3, "top_p": 0.8},
    3: {"temperature": 0.8, "top_k": 20, "seed": 4, "logprobs": 2},
    4: {"presence_penalty": 0.8, "repetition_penalty": 1.3, "logit_bias": ((9, 3.0),)},
}
"""Settings of some prompts. The others are greedy."""


class SmallForward:
    """Two layers of attention with random weights, in float16, with clear differences between the logits. Implements `Forward`."""

    can_score = True
    path = "layers"

    def __init__(
        self, place: Callable[[torch.Tensor], torch.Tensor], add: Callable[[torch.Tensor], torch.Tensor] = lambda update: update
    ) -> None:
        """`place`: moves the weights to the device. `add`: the sum over the ranks."""
        self._add = add
        drawn = torch.Generator().manual_seed(5)

        def weights(*shape: int) -> torch.Tensor:
            return place((torch.randn(*shape, generator=drawn) * 0.3).half())

        self._embedding, self._positions, self._head = weights(VOCABULARY, 64), weights(CONTEXT, 64), weights(64, VOCABULARY)
        self._layers = [(weights(64, 4 * 64), weights(2 * 64, 64)) for _ in LAYERS]

    def __call__(self, step: PackedStep, context: StepContext) -> torch.Tensor:
        return self.run_head(self.run_body(step, context), step.sampling)

    def run_body(self, step: PackedStep, context: StepContext) -> torch.Tensor:
        states = self._embedding[step.tokens] + self._positions[step.positions]
        for number, (projections, output) in enumerate(self._layers):
            heads = (states @ projections).view(-1, 4, 64)
            attended = context.attend(number, heads[:, :2], heads[:, 2:3], heads[:, 3:])
            states = states + self._add(attended.reshape(-1, 2 * 64) @ output)
        return states

    def run_head(self, answer: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return answer[places] @ self._head

    def score(self, step: PackedStep, context: StepContext, places: torch.Tensor) -> Any:
        raise NotImplementedError


def make_runner(
    device: torch.device,
    library: object,
    place: Callable[[torch.Tensor], torch.Tensor],
    pages: int = PAGES,
    scales: tuple[float, ...] | None = None,
    group: Group | None = None,
) -> ModelRunner:
    reference = Reference(TrialText.random(VOCABULARY), torch.zeros(0, dtype=torch.int64), torch.zeros(0))  # its steps are equal
    loaded = LoadedModel(None, LAYERS, Path(), "", VOCABULARY, (), CONTEXT, reference, torch.float16, device)  # type: ignore[arg-type]  # no modules
    spec = KVSpec(LAYERS, PAGE, torch.float16, device, scales)
    backend = FlashInferBackend(spec, pages, library)  # type: ignore[arg-type]  # a stand-in
    with patch.object(runner_module, "choose_forward", lambda *_: SmallForward(place, *(() if group is None else (group.add,)))):
        runner = ModelRunner(loaded, backend)
    runner.fused_sampler = FusedSampler(library.choose_tokens)  # type: ignore[attr-defined]  # as above
    return runner


def capture(
    runner: ModelRunner,
    machine: Machine,
    failure: Failure | None = None,
    slots: AdapterSlots | None = None,
    group: Group | None = None,
) -> list[str]:
    """Record the runner's graphs, as `make_runner` does, with one operation that fails. Return the names of the operations."""
    runner.graphs = None
    runner.graphs = graphs_for(runner.forward, runner.backend, GRAPH_ROWS, CONTEXT, slots=slots, group=group)
    assert runner.graphs is not None
    with machine.count_operations(failure) as operations:
        runner.graphs.capture()
    return operations


def capture_pieces(
    runner: ModelRunner, machine: Machine, failure: Failure | None = None, chosen: Sequence[int] = PIECES
) -> tuple[PieceSizes, list[str]]:
    """Record the runner's pieces for steps with prompts, as `make_runner` does, with one operation that fails."""
    sizes, runner.pieces = PieceSizes(max(chosen), [*chosen]), None
    with machine.count_operations(failure) as operations:
        runner.pieces = record_pieces(runner.graphs, runner.forward, runner.backend, CONTEXT, sizes)
    return sizes, operations


@dataclass
class Engine:
    """An engine stepped by hand."""

    runner: ModelRunner
    host_slots: int = 0
    pages: int = PAGES
    chunk: int = 8
    outputs: dict[str, list[Output]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = SchedulerConfig(CONTEXT, chunked_prefill_size=self.chunk, initial_new_token_ratio=0.0, min_new_token_ratio=0.0)
        self.cache = PrefixCache(PagePool(self.pages, PAGE), PAGE, extend, self.host_slots)
        self.scheduler = Scheduler(config, self.cache)
        self.overlap = Overlap(OverlapScheduler(self.scheduler), OverlappedRunner(self.runner), RequestTimer(), self._report)
        self.prompts: dict[str, int] = {}

    def _report(self, plan: StepPlan, result: StepResult, outputs: StepOutputs) -> None:
        for output in outputs:
            self.outputs.setdefault(output.id, []).append(output)

    def submit(self, prompt: int) -> None:
        """Submit `PROMPTS[prompt]`."""
        name = str(len(self.prompts))
        self.prompts[name] = prompt
        settings = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True} | SAMPLING.get(prompt, {})
        sampling = Sampling(**settings)
        assert self.scheduler.submit(Submit(name, array("I", PROMPTS[prompt]).tobytes(), sampling, 0)) is None

    def abort(self, number: int) -> None:
        output = self.scheduler.abort(str(number))
        if output is not None:
            self.outputs.setdefault(output.id, []).append(output)

    def step(self) -> None:
        self.overlap.step()

    def finish(self) -> None:
        """Step until all requests are complete."""
        for _ in range(400):
            if self.scheduler.idle:
                break
            self.overlap.step()
        else:
            raise AssertionError("the requests do not end")
        self.overlap.reconcile()

    def answers(self) -> dict[str, list[int]]:
        """Return the tokens of each complete request."""
        return {
            name: array("I", b"".join(one.tokens for one in outputs)).tolist()
            for name, outputs in self.outputs.items()
            if outputs[-1].finish != "abort"
        }


def expected_answers(scales: tuple[float, ...] | None = None, group: Group | None = None) -> list[list[int]]:
    """Return the tokens of each prompt, alone on the CPU."""
    engine = Engine(make_runner(torch.device("cpu"), interpreter, lambda weights: weights, 64, scales, group), pages=64)
    for prompt in range(len(PROMPTS)):
        engine.submit(prompt)
        engine.finish()
    return [engine.answers()[str(prompt)] for prompt in range(len(PROMPTS))]


@contextmanager
def device_engine(
    *,
    graphs: bool = True,
    pieces: bool = False,
    host_tier: bool = True,
    is_old: bool = False,
    scales: tuple[float, ...] | None = None,
    group: Callable[[DeviceMode], Group] | None = None,
) -> Iterator[tuple[Engine, DeviceMode]]:
    """Yield an engine on a new modelled device. `is_old`: as in `Machine`. `scales`: of KV in float8. `group`: makes the ranks."""
    with (
        patch.object(workspace, "LEAST_WORKSPACE", 1024),
        patch.object(host, "STAGING_BYTES", 2 * KVSpec(LAYERS, PAGE, torch.float16, CUDA).page_bytes),
        modelled_device(is_old) as mode,
    ):
        ranks = None if group is None else group(mode)
        runner = make_runner(CUDA, make_library(mode), mode.adopt, scales=scales, group=ranks)
        if graphs:
            capture(runner, mode.machine, group=ranks)
        if pieces:
            capture_pieces(runner, mode.machine)
        if host_tier:
            runner.host = host.CudaHostStore(runner.backend, SLOTS)
        try:
            yield Engine(runner, SLOTS if host_tier else 0), mode
        finally:
            runner.host = None  # unpins its memory
