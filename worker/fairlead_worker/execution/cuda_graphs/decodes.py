"""CUDA graphs for decode-only steps: one graph for each of some batch sizes. Smaller batches are padded to the next size.

A graph replays its kernels on the memory that it was captured with, so a step's inputs are copied to where the graph reads them. Padding
rows use a reserved page. FlashInfer plans on the host, so its plan is renewed before each replay, outside the graph; planning writes the
page tables into the graph's buffers. Steps without a matching graph run eagerly.

If tokens are drafted, each size is recorded for joined rows too (`kernels.verification`), where the first query of each row is one more
input: the prefill wrapper then attends, over as many rows as tokens, of which the last ones are empty.

If requests may have LoRA adapters, each size is recorded twice: plain, so that steps without an adapter pay nothing, and with the
adapter slots (`lora/slots.py`), where a row's slot is one more input.

The ranks of a sharded model record the same graphs in the same order. Until all have recorded one, none waits for another in a collective:
the run before a capture leaves them out, and a capture runs nothing. So if one rank fails, all of them can go on without graphs
(`sharding.group.Group.agree`). Rank 0 decides which graph a step replays, and sends it with the step.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

import torch

from fairlead_worker.cache.states import PREVIOUS
from fairlead_worker.execution.cuda_graphs.recorder import CudaRecorder, Recorder
from fairlead_worker.execution.cuda_graphs.states import GraphStates
from fairlead_worker.execution.forward import Forward
from fairlead_worker.kernels.base import Backend, GroupPages, PackedStep
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.kernels.paging import Paging, pad_rows, plan_pages
from fairlead_worker.kernels.states import Recurrent, StatefulBackend, StateStore
from fairlead_worker.kernels.transfer import to_device
from fairlead_worker.kernels.verification import join_rows
from fairlead_worker.lora.slots import AdapterSlots
from fairlead_worker.sharding.group import Group
from fairlead_worker.weights.progress import Progress, no_progress

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Choice(NamedTuple):
    """The graph that a step replays."""

    rows: int
    """Its size."""
    joins: bool = False
    """Whether rows of one request are joined."""


def batch_sizes(most: int) -> list[int]:
    """Return the batch sizes up to `most`, ascending: 1, 2, 4, 8, then each power of two and the midpoint to the next one, and `most`."""
    sizes = {1, 2, 4, 8, most}
    power = 16
    while power <= most:
        sizes |= {power, power * 3 // 2}
        power *= 2
    return sorted(size for size in sizes if size <= most)


class GraphedDecodes:
    """The graphs of a forward on a FlashInfer backend."""

    def __init__(
        self,
        forward: Forward,
        backend: FlashInferBackend,
        most: int,
        context: int,
        recorder: Recorder,
        slots: AdapterSlots | None = None,
        verifies: bool = False,
        group: Group | None = None,
        states: StateStore | None = None,
    ) -> None:
        """`most`: rows of the largest graph. `context`: tokens of the longest request. `slots`: of the rows' adapters. `verifies`: whether
        steps may have drafted tokens. `group`: the ranks, which all record the same graphs; None: this process alone has the model.
        `states`: of recurrent layers; None: the model has none.
        """
        self._forward, self._backend, self._slots, self._group, self._states = forward, backend, slots, group, states
        self.recorder = recorder
        pages = most * -(-context // backend.spec.page_size)
        self._pages = torch.zeros(backend.spec.num_groups, pages, dtype=torch.int32, device=backend.spec.device)
        """Page tables of the step that is replayed, for each group of layers, shared by all graphs."""
        self.sizes = batch_sizes(most)
        self.failure = ""
        """Why decodes cannot be recorded; empty if they can."""
        self.adapter_failure = ""
        """Why decodes with LoRA adapters cannot be recorded; empty if they can."""
        self.verification_failure = ""
        """Why drafted tokens cannot be recorded as joined rows; empty if they can."""
        self._graphs: dict[int, _Graph] = {}
        self._verifies = verifies
        self._verifications: dict[int, _Graph] = {}
        """Graphs of joined rows, by their tokens."""

    @property
    def is_recorded(self) -> bool:
        """Return whether every size is recorded."""
        return len(self._graphs) == len(self.sizes)

    @torch.inference_mode()
    def capture(self, progress: Progress = no_progress) -> None:
        """Record every size, largest first, so that smaller ones fit into its memory. Sizes that cannot be recorded run without a graph."""
        for done, size in enumerate(reversed(self.sizes)):
            progress("capture", 100 * done // len(self.sizes))
            failures = self.adapter_failure, self.verification_failure
            graph = self._record(size)
            if graph is None:
                logger.warning("decodes run without CUDA graphs: %s", self.failure)
                self._clear()
                return
            self._graphs[size] = graph
            self._record_verification(size)
            if self._group is not None and failures != (self.adapter_failure, self.verification_failure):
                self._clear()  # they use the communicators that the ranks have replaced
                self.capture(progress)
                return
        progress("capture", 100)
        adapted = "" if self._slots is None else ", each with and without LoRA adapters"
        logger.info("CUDA graphs for decodes of %s rows%s", ", ".join(map(str, self.sizes)), adapted)

    def _attempt(self, what: str, record: Callable[[], T]) -> tuple[T | None, str]:
        """Return what `record` returns, or None and why it fails on this rank or on another."""
        recorded, failure = None, ""
        try:
            recorded = record()
        except Exception as error:  # whatever a kernel raises that cannot be recorded
            failure = f"{what} cannot be recorded: {describe_failure(error)}"
        if self._group is not None:
            failure = self._group.agree(failure)
            if failure:
                self._group.reconnect()
        return (None if failure else recorded), failure

    def _clear(self) -> None:
        self._graphs.clear()
        self._verifications.clear()

    def _record(self, size: int) -> "_Graph | None":
        what = f"a step of {size} decodes"
        graph, self.failure = self._attempt(what, lambda: _Graph(self._backend, size, self._pages, self._states))
        if graph is None:
            return None
        self._record_adapted(graph, size)
        recorded, self.failure = self._attempt(what, lambda: graph.record(self._forward, self.recorder))
        return recorded

    def _record_verification(self, size: int) -> None:
        if not self._verifies or size < 2:
            return
        graph, failure = self._attempt(
            f"a step of {size} drafted tokens",
            lambda: _Graph(self._backend, size, self._pages, None, joins=True).record(self._forward, self.recorder),
        )
        if graph is None:
            self.verification_failure = failure
            logger.warning("drafted tokens are rows of their own in CUDA graphs: %s", self.verification_failure)
            self._verifies = False
            self._verifications.clear()
            return
        self._verifications[size] = graph

    def _record_adapted(self, graph: "_Graph", size: int) -> None:
        slots = self._slots
        if slots is None:
            return
        recorded, failure = self._attempt(
            f"a step of {size} decodes with LoRA adapters", lambda: graph.record_adapted(self._forward, self.recorder, slots)
        )
        if recorded is None:
            self.adapter_failure = failure
            logger.warning("decodes with LoRA adapters run without CUDA graphs: %s", self.adapter_failure)
            self._slots = None

    def run(self, step: PackedStep) -> torch.Tensor | None:
        """Return logits [S, vocabulary] of `step`, valid until the next step.

        None if no graph fits: the step has prompts, too many rows, or an adapter without a slot.
        """
        chosen = self.choose(step)
        return None if chosen is None else self.replay(chosen, step)

    def choose(self, step: PackedStep) -> Choice | None:
        """Return the graph that `step` replays; None if none fits."""
        rows = len(step.starts)
        if len(step.tokens) != rows or len(step.sampling) != rows:
            return None
        if any(state is not None and state.source == PREVIOUS for state in step.states):
            return None  # a graph advances all states at once
        slots = self._slots_of(step)
        if slots is None:
            return None
        size = next((size for size in self.sizes if size >= rows), 0)
        if size not in self._graphs:
            return None
        return Choice(size, joins=not slots and size in self._verifications and join_rows(step) is not None)

    def replay(self, chosen: Choice, step: PackedStep) -> torch.Tensor:
        """Return logits as `run`, from the chosen graph. Raises RuntimeError if it is not recorded, or has no slot for an adapter."""
        graph, slots = (self._verifications if chosen.joins else self._graphs).get(chosen.rows), self._slots_of(step)
        if graph is None or slots is None:
            raise RuntimeError(f"rank 0 replays a CUDA graph of {chosen.rows} rows, which this rank has not recorded for such a step")
        return graph.run(step, slots)[: len(step.starts)]

    def _slots_of(self, step: PackedStep) -> Sequence[int] | None:
        """Return the slot of each row's adapter; empty if no row has one, None if an adapter has no slot."""
        if not step.adapters:
            return ()
        return None if self._slots is None else self._slots.of(step.adapters)


class _Graph:
    """One batch size: the memory that its kernels read, and its replays. Implements `RecurrentContext` for its own recording."""

    def __init__(self, backend: FlashInferBackend, size: int, pages: torch.Tensor, states: StateStore | None, joins: bool = False) -> None:
        """`joins`: rows of one request are joined."""
        device = backend.spec.device
        self._backend, self._size = backend, size
        self._padding = backend.padding_page
        slots = torch.full((size,), self._padding * backend.spec.page_size, device=device)
        table = torch.full((size,), self._padding, dtype=torch.int32)
        self._inputs = PackedStep(
            tokens=torch.zeros(size, dtype=torch.int64, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            slots=slots,
            starts=[0] * size,
            counts=[1] * size,
            page_indptr=torch.arange(size + 1, dtype=torch.int32),
            page_indices=table,
            sampling=torch.arange(size, device=device),
            others=[GroupPages(slots, table)] * (len(pages) - 1),
        )
        self._paging = Paging(
            query_indptr=torch.arange(size + 1, dtype=torch.int32, device=device),
            page_indptr=torch.arange(size + 1, dtype=torch.int32, device=device),
            page_indices=pages[0],
            last_page_len=torch.ones(size, dtype=torch.int32, device=device),
            rows=torch.arange(size, dtype=torch.int32, device=device),
            positions=torch.zeros(size, dtype=torch.int32, device=device),
            single=not joins,
            zeros=torch.zeros(size, dtype=torch.int32, device=device),
            others=tuple(pages[1:]),
            lengths=torch.ones(size, dtype=torch.int32, device=device),
        )
        self._pagings = self._paging.each
        self._has_latents = any(kind.value_in_key for kind in backend.kinds)
        self._wrappers = backend.graph_wrappers(self._paging)
        self._states = None if states is None else GraphStates(states, size)
        self._adapter_slots = torch.zeros(size, dtype=torch.int64, device=device)
        self._replay: Callable[[], torch.Tensor] | None = None
        self._replay_adapted: Callable[[], torch.Tensor] | None = None

    def record(self, forward: Forward, recorder: Recorder) -> "_Graph":
        """Return this graph."""
        self._plan(self._inputs)
        self._replay = recorder.record(lambda: forward(self._inputs, self))
        return self

    def record_adapted(self, forward: Forward, recorder: Recorder, slots: AdapterSlots) -> "_Graph":
        """Return this graph."""

        def run() -> torch.Tensor:
            with slots.activate(self._adapter_slots):
                return forward(self._inputs, self)

        self._plan(self._inputs)
        self._replay_adapted = recorder.record(run)
        return self

    def run(self, step: PackedStep, adapter_slots: Sequence[int] = ()) -> torch.Tensor:
        """Return logits [size, vocabulary]. `adapter_slots`: slot of each row; empty: no row has an adapter."""
        replay = self._replay_adapted if adapter_slots else self._replay
        assert replay is not None, "it was recorded"
        whole = self._pad(step)
        for name in ("tokens", "positions", "slots"):
            getattr(self._inputs, name).copy_(getattr(whole, name))
        if adapter_slots:
            padded = [*adapter_slots, *[0] * (self._size - len(adapter_slots))]
            self._adapter_slots.copy_(to_device(padded, self._adapter_slots.device))
        self._paging.positions.copy_(whole.positions)
        self._plan(whole)
        if self._states is None:
            return replay()
        self._states.fill(step)
        logits = replay()
        self._states.copy_snapshots(step)
        return logits

    def scan(self, layer: Recurrent, *inputs: torch.Tensor) -> torch.Tensor:
        assert self._states is not None, "a model with recurrent layers has their states"
        return self._states.scan(layer, *inputs)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        backend = self._backend
        plan = backend.keys_of[layer]
        backend.store(layer, self._pagings[plan[0]], key, value)
        queries = query.to(backend.spec.dtype)
        output = backend.make_output(layer, queries)
        backend.run(self._wrappers[plan], layer, queries, output)
        return output.to(query.dtype)

    def _plan(self, step: PackedStep) -> None:
        backend, size, device = self._backend, self._backend.spec.page_size, self._paging.rows.device
        if self._paging.single:
            paging = plan_pages(step, size)
        else:
            paging = pad_rows(plan_pages(join_rows(step) or step, size), self._size)
            self._paging.rows.copy_(to_device(paging.rows, device))
        if self._has_latents:  # their plans do not write it
            self._paging.last_page_len.copy_(to_device(paging.last_page_len, device))
        backend.plan_graph(self._wrappers, paging)

    def _pad(self, step: PackedStep) -> PackedStep:
        """Append one-token rows on the padding page until the step has `size` rows."""
        more = self._size - len(step.starts)
        end = int(step.page_indptr[-1])

        def longer(part: torch.Tensor, value: int) -> torch.Tensor:
            return torch.nn.functional.pad(part, (0, more), value=value)

        def padded(pages: GroupPages) -> GroupPages:
            slots = longer(pages.slots, self._padding * self._backend.spec.page_size)
            return GroupPages(slots, longer(pages.page_indices, self._padding))

        first, *others = map(padded, (GroupPages(step.slots, step.page_indices), *step.others))
        whole = replace(
            step,
            tokens=longer(step.tokens, 0),
            positions=longer(step.positions, 0),
            starts=[*step.starts, *[0] * more],
            counts=[*step.counts, *[1] * more],
            page_indptr=torch.cat((step.page_indptr, torch.arange(end + 1, end + more + 1, dtype=torch.int32))),
        )
        return whole.with_pages(first, others)


def describe_failure(error: BaseException) -> str:
    """Return the messages of `error` and of the errors before it, in one line: the end of a broken capture raises again, and says only
    that there was an error before.
    """
    lines, seen = [], [error]
    while (before := seen[-1].__cause__ or seen[-1].__context__) is not None and before not in seen:
        seen.append(before)
    for each in seen:  # not the errors themselves: their tracebacks keep the memory of the capture
        text = str(each).strip().partition("\n")[0]  # CUDA's advice on debugging follows
        lines.append(f"{type(each).__name__}: {text}" if text else type(each).__name__)
    return ", after ".join(dict.fromkeys(lines))


def graphs_for(
    forward: Forward,
    backend: Backend,
    most: int,
    context: int,
    recorder: Recorder | None = None,
    slots: AdapterSlots | None = None,
    verifies: bool = False,
    group: Group | None = None,
) -> GraphedDecodes | None:
    """Return graphs for up to `most` rows, not yet recorded. `verifies`: also for drafted tokens. `group`: as in `GraphedDecodes`.

    None if `most` is 0, or if the backend or a layer kind is not FlashInfer's.
    """
    if not most or (recorder is None and backend.spec.device.type != "cuda"):
        return None
    if reason := unsupported_reason(backend):
        logger.warning("decodes run without CUDA graphs%s", reason)
        return None
    attention, states = (backend.attention, backend.store) if isinstance(backend, StatefulBackend) else (backend, None)
    assert isinstance(attention, FlashInferBackend), "there is no reason why not"
    return GraphedDecodes(forward, attention, most, context, recorder or CudaRecorder(group), slots, verifies, group, states)


def unsupported_reason(backend: Backend) -> str:
    """Return why decodes on `backend` cannot run as graphs; empty if they can."""
    if isinstance(backend, StatefulBackend):
        return unsupported_reason(backend.attention)
    if not isinstance(backend, FlashInferBackend):
        return f": attention is {backend.name}, and graphs are for flashinfer"
    if backend.batch_invariant:
        return " beside --deterministic, which computes them as prompts"
    left_out: Sequence[object] = [kind for kind in dict.fromkeys(backend.spec.layers) if kind not in backend.kinds]
    return f": {len(left_out)} kinds of layers have reference attention" if left_out else ""


class Graphs(Protocol):
    """Graphs for some steps."""

    def run(self, step: PackedStep) -> torch.Tensor | None:
        """Return logits [S, vocabulary] of `step`; None if no graph fits."""
        ...


def run_step(step: PackedStep, forward: Forward, backend: Backend, *graphs: Graphs | None) -> torch.Tensor:
    """Return logits [S, vocabulary] of `step`, from the first of `graphs` that fits. They stay valid until its next replay."""
    for some in graphs:
        if some is not None and (logits := some.run(step)) is not None:
            return logits
    return forward(step, backend.plan(step))
