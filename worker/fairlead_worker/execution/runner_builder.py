"""Builds a model runner: measures what its steps and CUDA graphs need, takes the rest for KV, and records the graphs."""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from fairlead_worker.cache.states import StateSlots
from fairlead_worker.execution.cuda_graphs.decodes import GraphedDecodes, batch_sizes, graphs_for, unsupported_reason
from fairlead_worker.execution.cuda_graphs.piecewise import PieceSizes, record_pieces
from fairlead_worker.execution.draft import Drafter
from fairlead_worker.execution.forward import Forward, choose_forward
from fairlead_worker.execution.host import make_host_store
from fairlead_worker.execution.memory import kv_budget
from fairlead_worker.execution.memory_profile import middle_plan, run_largest_draft, run_largest_step
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.sizing import DeviceMemory, choose_chunk, largest_chunk, measure_allocation, memory_of, profile_memory
from fairlead_worker.kernels.base import Backend, KVSpec
from fairlead_worker.kernels.cpu import CpuBackend
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.kernels.groups import cache_groups, choose_groups, describe_groups
from fairlead_worker.kernels.registry import make_backend
from fairlead_worker.kernels.states import StatefulBackend, StateStore, count_slots, count_token_pages, describe_states
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.lora.slots import AdapterSlots
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.sampling.fused import FusedSampler
from fairlead_worker.sampling.grammars import Grammars
from fairlead_worker.sampling.trial import make_fused_sampler
from fairlead_worker.scheduler.config import LEAST_CHUNK, SchedulerConfig
from fairlead_worker.scheduler.limits import StepLimits, limit_steps
from fairlead_worker.sharding.group import Group
from fairlead_worker.weights.progress import Progress, no_progress

logger = logging.getLogger(__name__)

CHUNK_TRIALS = 3
"""Steps of each size whose fastest counts: the first fills caches."""
SAMPLES = 3
"""Largest graphs of each kind that are recorded to measure the memory of all, which takes seconds of a start."""


@dataclass(slots=True)
class _Failures:
    """Why some CUDA graphs cannot be recorded; empty: they can, or were not wanted."""

    decodes: str = ""
    adapters: str = ""
    verification: str = ""
    draft: str = ""
    """Of the draft model."""

    def add(self, graphs: GraphedDecodes | None) -> None:
        if graphs is not None:
            self.decodes = self.decodes or graphs.failure
            self.adapters = self.adapters or graphs.adapter_failure
            self.verification = self.verification or graphs.verification_failure


@dataclass(slots=True, kw_only=True)
class RunnerBuilder:
    """The settings of a runner. `build` makes it.

    `kv_pages` 0 means as many pages as `kv_cache_bytes` hold. If that is 0 too, the runner takes what memory has room for. On a GPU that
    room is measured by running the largest step of `steps`. If that step does not fit, the runner's `step_tokens` is the largest one that
    does. Without `steps`, and on a CPU, KV takes a share of the free memory.
    """

    loaded: LoadedModel
    page_size: int
    backend: str = "auto"
    kv_pages: int = 0
    kv_cache_bytes: int = 0
    native_decoder: bool = True
    host_kv_cache_bytes: int = 0
    """Size of the host tier, see `make_host_store`."""
    draft: LoadedModel | None = None
    """The draft model for the speculation method "draft". Its KV has as many pages, from the same memory."""
    adapters: AdapterSet | None = None
    """LoRA adapters of `loaded`, if its requests may use them."""
    grammars: Grammars | None = None
    steps: SchedulerConfig | None = None
    chunk_seconds: float = 0.0
    """Most seconds of a chunk that is measured with the memory (`choose_chunk`); 0: it has the size in `steps`."""
    mem_fraction_static: float = 0.92
    """Share of a GPU's memory that is used at most."""
    graph_rows: int = 0
    """Most decodes in a step that runs as a CUDA graph; 0: no graphs. Their memory is measured together with the largest step."""
    piece_tokens: int = 0
    """Most tokens of a step with prompts that runs as piecewise CUDA graphs, where graphs help (`piecewise`); 0: none."""
    state_snapshots: int = 0
    """Snapshots of recurrent states; 0: as many as `count_slots` finds room for."""
    deterministic: bool = False
    """A row's bits must not depend on the batch. `execution.batch_invariance` verifies it."""
    progress: Progress = no_progress
    group: Group | None = None
    """The ranks of a sharded model, which get as many pages as each of them has room for."""
    memory: DeviceMemory | None = None
    """Memory of the device; None: read from the device."""

    _spec: KVSpec = field(init=False)
    _draft_spec: KVSpec | None = field(init=False, default=None)
    _why_one_group: str = field(init=False)
    _rows: int = field(init=False)
    """`graph_rows` that steps can have; 0 after a failed recording."""
    _drafted_rows: int = field(init=False)
    """The same for the draft model."""
    _pieces: PieceSizes = field(init=False)
    _failures: _Failures = field(init=False, default_factory=_Failures)
    _step_tokens: int = field(init=False, default=0)
    _chunk: int = field(init=False, default=0)
    _slots: StateSlots = field(init=False, default=StateSlots(0, 0, 0))
    _fused_sampler: FusedSampler | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        loaded, steps = self.loaded, self.steps
        self._spec = KVSpec(loaded.layers, self.page_size, loaded.dtype, loaded.device, loaded.kv_scales)
        groups, self._why_one_group = choose_groups(self._spec, loaded.max_model_len, self.draft is not None)
        self._spec = replace(self._spec, groups=() if loaded.states else groups)
        if self.draft is not None:
            self._draft_spec = KVSpec(self.draft.layers, self.page_size, self.draft.dtype, self.draft.device)
        self._rows, tokens = (self.graph_rows, self.piece_tokens) if loaded.generates else (0, 0)
        if loaded.states:
            tokens = 0  # a row of a prompt scans its states in parts of its own
        if steps is not None:
            limits = StepLimits.from_config(steps, self.page_size)
            self._rows, tokens = min(self._rows, limits.decode), min(tokens, limits.tokens)  # each drafted token is a row of its own
        self._drafted_rows = self._rows if steps is None else min(self._rows, steps.max_num_seqs)
        self._pieces = PieceSizes(tokens if loaded.ranks == 1 else 0)  # `build.choose_modes` reports this to the user

    def build(self) -> ModelRunner:
        """Return the runner. Raises ValueError if not even one page fits, or if the backend is unknown."""
        if self.loaded.generates:
            self._fused_sampler = make_fused_sampler(self.loaded.device, self.loaded.vocabulary_size, self.loaded.dtype)
        memory = self.memory or memory_of(self.loaded.device)
        room = self.kv_cache_bytes
        if not self.kv_pages and not room and self.steps is not None and memory is not None:
            room = self._measure_steps(memory, self.steps)
            if self._rows:
                room = max(0, room - self._measure_graphs(memory))
        self.progress("cache", 0)
        runner = self._allocate(self._count_pages(room))
        self._record(runner)
        return runner

    # Memory

    def _measure_steps(self, memory: DeviceMemory, steps: SchedulerConfig) -> int:
        """Run the largest step that fits, and return the bytes that are left for KV."""

        def attempt(tokens: int) -> None:
            limited = limit_steps(steps, tokens, self.page_size)
            limits = StepLimits.from_config(limited, self.page_size)
            trial = ModelRunner(self.loaded, self._make_trial_backend(), adapters=self.adapters)
            with nullcontext(0) if self.adapters is None else self.adapters.profile_adapter() as adapter:
                run_largest_step(limits, self.page_size, trial.logits, adapter, self._fused_sampler)
            if self.draft is not None and self._draft_spec is not None:
                drafting = ModelRunner(self.draft, self._make_backend(self._draft_spec, 1, no_progress), self.native_decoder)
                run_largest_draft(limits, limited.max_num_seqs, self.page_size, drafting.logits)

        self._allocate_slots_for(self._make_backend(self._spec, 1, self.progress, self.deterministic))
        self.progress("profile", 0)
        if self.chunk_seconds:
            self._chunk = self._measure_chunk(memory, steps)
            steps = replace(steps, chunked_prefill_size=self._chunk)
        usual = StepLimits.from_config(replace(steps, idle_prefill_chunks=1), self.page_size).tokens
        tokens, least = StepLimits.from_config(steps, self.page_size).tokens, 2 * self.page_size
        if self.loaded.ranks > 1:
            # An out-of-memory error on one rank leaves the others blocked inside the step. So a sharded model tries a single size, which
            # must fit.
            tokens = least = usual
        found = profile_memory(memory, self.mem_fraction_static, tokens, least, attempt, usual)
        self._step_tokens = found.step_tokens
        self._pieces.most = min(self._pieces.most, found.step_tokens)
        return max(0, found.kv_bytes - self._pending_bytes())

    def _measure_chunk(self, memory: DeviceMemory, steps: SchedulerConfig) -> int:
        """Return the tokens of a chunk, the same on all ranks."""
        trial = ModelRunner(self.loaded, self._make_trial_backend(), adapters=self.adapters)

        def run(tokens: int) -> None:
            trial.logits(middle_plan(tokens, steps.max_model_len, self.page_size)).argmax().item()  # waits for the device

        def seconds_of(tokens: int) -> float:
            times = [time.perf_counter()]
            for _ in range(CHUNK_TRIALS):
                run(tokens)
                times.append(time.perf_counter())
            microseconds = int(1e6 * min(end - begin for begin, end in pairwise(times)))
            return 1e-6 * (microseconds if self.group is None else self.group.least(microseconds))

        try:
            step_bytes = memory.peak_of(lambda: run(LEAST_CHUNK))
        except torch.OutOfMemoryError:
            if self.group is not None:
                raise
            return LEAST_CHUNK  # the profile makes steps smaller
        most = largest_chunk(step_bytes, memory.free(), steps.max_prefill_tokens)
        return choose_chunk(seconds_of, self.chunk_seconds, most if self.group is None else self.group.least(most))

    def _measure_graphs(self, memory: DeviceMemory) -> int:
        """Record the largest graphs, give them back, and return the bytes that all graphs will take.

        Smaller graphs run in the memory of the largest one, and each takes as much for its kernels and inputs as the one before (vLLM's
        `profile_cudagraph_memory` continues its samples in the same way).
        """

        def record(largest: int) -> object:
            backend = self._make_trial_backend()
            tried = ModelRunner(self.loaded, backend, adapters=self.adapters)
            graphs = self._record_decodes(tried.forward, backend, largest)
            self._failures.add(graphs)
            return graphs, record_pieces(graphs, tried.forward, backend, self.loaded.max_model_len, self._pieces, self.progress, largest)

        def record_draft(largest: int) -> object:
            assert self.draft is not None and self._draft_spec is not None, "there is a draft model"
            tried = ModelRunner(self.draft, self._make_backend(self._draft_spec, 1, no_progress))
            graphs = self._capture(tried.forward, tried.backend, self._drafted_rows, largest=largest)
            self._failures.draft = "" if graphs is None else graphs.failure
            return graphs

        def measure(record: Callable[[int], object], rows: int, has_pieces: bool) -> int:
            """The first recording also takes what stays for good, such as loaded modules: it counts once, and so is no sample."""

            def take(largest: int) -> int:
                return measure_allocation(memory, lambda: record(largest))

            taken = take(SAMPLES)
            further = max(len(batch_sizes(rows)), len(self._pieces.chosen or ()) if has_pieces else 0) - SAMPLES
            if further <= 0 or self._failures.decodes or self._failures.draft:
                return taken
            return taken + further * max(0, take(2) - take(1))

        taken = measure(record, self._rows, has_pieces=True)
        if self.draft is not None:
            taken += measure(record_draft, self._drafted_rows, has_pieces=False)
        logger.info("memory: CUDA graphs take %.2f GiB", taken / 2**30)
        if self._failures.decodes:  # each failed capture leaves its memory allocated in some releases of torch
            self._rows = self._drafted_rows = 0
        if self._failures.draft:  # only of rank 0: graphs of the ranks stay
            self._drafted_rows = 0
        return taken

    def _count_pages(self, room: int) -> int:
        """Return the pages of the KV that `room` bytes hold; without a measurement, those of a share of the free memory."""
        page_bytes = self._spec.page_bytes + (0 if self._draft_spec is None else self._draft_spec.page_bytes)
        units = self._spec.num_groups  # `kv_pages` are pages of all layers
        room = room if self._step_tokens or self.kv_pages else room or kv_budget(self.loaded.device, self.loaded.ranks)
        if self.loaded.states:
            room = self._count_slots(room)
        pages = self.kv_pages * units or (room // page_bytes if page_bytes else self._count_token_pages())
        if self.group is not None:
            pages = self.group.least(pages)
        if pages < units:
            pending = self._pending_bytes()
            raise ValueError(
                f"no memory for KV: one page of {self.page_size} tokens takes {units * page_bytes} bytes, and there is room for {room}; "
                "raise --kv-cache-memory-bytes (--mem-fraction-static on a GPU), or free memory"
                + (f"; adapters that are loaded later take {pending}: lower --max-loras or --max-lora-rank" if pending else "")
            )
        return pages

    def _count_slots(self, room: int) -> int:
        """Choose the slots of recurrent states; return what they leave of `room` bytes."""
        most = SchedulerConfig(1).max_num_seqs if self.steps is None else self.steps.max_num_seqs
        slots = count_slots(self.loaded.states, self._spec, most, self.state_snapshots, 0 if self.kv_pages else room)
        if self.group is not None:
            slots = replace(slots, running=self.group.least(slots.running), total=self.group.least(slots.total))
        if slots.running < most:
            logger.warning("at most %d requests run at once, not %d: their recurrent states take the memory", slots.running, most)
        self._slots = slots
        return max(0, room - slots.all_bytes)

    def _count_token_pages(self) -> int:
        return count_token_pages(self.loaded.max_model_len, self.page_size, self._slots.running)

    def _pending_bytes(self) -> int:
        return 0 if self.adapters is None else self.adapters.pending_bytes()

    # Parts

    def _allocate(self, pages: int) -> ModelRunner:
        """Return the runner with its KV and without graphs."""
        attention = self._make_backend(self._spec, pages, self.progress, self.deterministic)
        self._allocate_slots_for(attention)
        backend = self._with_states(attention, self._slots) if self.loaded.states else attention
        runner = ModelRunner(
            self.loaded,
            backend,
            self.native_decoder,
            host=make_host_store(backend, self.host_kv_cache_bytes if self._spec.layers else 0),
            drafter=self._make_drafter(pages),
            adapters=self.adapters,
            grammars=self.grammars,
        )
        runner.kv_groups = describe_groups(cache_groups(self._spec, self.loaded.max_model_len), self._why_one_group)
        if self.loaded.states:
            runner.kv_groups = describe_states(self._spec, self._slots)
        runner.step_tokens, runner.chunk_tokens = self._step_tokens, self._chunk
        runner.fused_sampler = self._fused_sampler
        return runner

    def _make_drafter(self, pages: int) -> Drafter | None:
        if self.draft is None or self._draft_spec is None:
            return None
        backend = self._make_backend(self._draft_spec, pages, self.progress)
        forward = choose_forward(self.draft, backend, self.native_decoder)
        drafter = Drafter(forward, self.draft, backend, self.loaded.vocabulary_size)
        drafter.graphs = self._capture(forward, backend, self._drafted_rows)
        if drafter.graphs is not None and drafter.graphs.failure:
            self._failures.draft, drafter.graphs = drafter.graphs.failure, None
        return drafter

    def _record(self, runner: ModelRunner) -> None:
        runner.graphs = self._record_decodes(runner.forward, runner.backend)
        failures = self._failures
        failures.add(runner.graphs)
        runner.pieces = record_pieces(runner.graphs, runner.forward, runner.backend, self.loaded.max_model_len, self._pieces, self.progress)
        runner.graph_failure = failures.decodes or failures.adapters or failures.verification or failures.draft or self._pieces.failure

    def _record_decodes(self, forward: Forward, backend: Backend, largest: int = 0) -> GraphedDecodes | None:
        """Return the `largest` graphs of the model's decodes (0: all), without the kinds that failed before."""
        slots = None if self.adapters is None or self._failures.adapters else self.adapters.slots
        verifies = self.steps is not None and self.steps.speculative_method != "none" and not self._failures.verification
        verifies = verifies and not self.loaded.states  # a graph advances all states at once
        return self._capture(forward, backend, self._rows, slots, verifies, self.group, largest)

    def _capture(
        self,
        forward: Forward,
        backend: Backend,
        rows: int,
        slots: AdapterSlots | None = None,
        verifies: bool = False,
        group: Group | None = None,
        largest: int = 0,
    ) -> GraphedDecodes | None:
        """Return recorded graphs for up to `rows` decodes; None where the backend, or that of another rank, cannot have them.

        largest: only that many sizes; 0: all.
        """
        if rows and group is not None and (reason := group.agree(unsupported_reason(backend))):
            logger.warning("decodes run without CUDA graphs%s", reason)
            return None
        graphs = graphs_for(forward, backend, rows, self.loaded.max_model_len, slots=slots, verifies=verifies, group=group)
        if graphs is not None:
            graphs.sizes = graphs.sizes[-largest:]
            graphs.capture(self.progress)
        return graphs

    def _allocate_slots_for(self, backend: Backend) -> None:
        if self.adapters is not None and self._rows and not unsupported_reason(backend):
            self.adapters.allocate_slots()

    def _with_states(self, backend: Backend, slots: StateSlots) -> Backend:
        states = self.loaded.states
        return StatefulBackend(backend, StateStore(states, slots, self.loaded.device)) if states else backend

    def _make_trial_backend(self) -> Backend:
        """Return a backend with one page and the slot of one request, for steps whose results are dropped."""
        return self._with_states(self._make_backend(self._spec, 1, no_progress, self.deterministic), StateSlots(1, 1, 0))

    def _make_backend(self, spec: KVSpec, pages: int, progress: Progress, batch_invariant: bool = False) -> Backend:
        """Return a backend with its kernels built at startup, not at the first request."""
        backend = make_backend(self.backend if spec.layers else "reference", spec, pages)
        if isinstance(backend, CpuBackend):
            backend.batch_invariant = batch_invariant
        if isinstance(backend, FlashInferBackend):
            backend.batch_invariant = batch_invariant
            progress("compile", 0)
            backend.prepare()
        return backend
