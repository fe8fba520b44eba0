"""Piecewise CUDA graphs, for steps with prompts: the model between two attention calls is replayed, and attention runs as in a plain step.

Attention of chunks depends on the rows of a step, the other layers only on the number of its tokens. So there are graphs for some numbers
of tokens, to which steps are padded (vLLM's PIECEWISE mode). A forward pass is recorded in pieces: each attention call ends one and begins
the next (SGLang's breakable graphs), so no compiler takes the model apart.

One graph with the attention inside would fix the number of rows too, and FlashInfer (0.7.2) then plans a chunk with its largest tile,
always splits its keys, and needs a second plan for the decodes beside it: a graph for each pair of sizes, without fa3.

A piece stores keys and values, and copies queries to memory that all pieces share. Attention reads them there and writes to memory that the
next piece reads. Both are outside the graphs' pool, whose blocks other graphs reuse (sglang#37606). Padding has tokens of its own on the
padding page, and zeros for its attention.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fairlead_worker.execution.adapted import AdaptedForward
from fairlead_worker.execution.cuda_graphs.decodes import GraphedDecodes, describe_failure
from fairlead_worker.execution.cuda_graphs.recorder import Cut, Recorder
from fairlead_worker.execution.forward import Forward, SplitForward
from fairlead_worker.kernels.base import Backend, GroupPages, LayerSpec, PackedStep
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.kernels.flashinfer_wrappers import StepPart
from fairlead_worker.kernels.paging import Paging
from fairlead_worker.kernels.transfer import to_device
from fairlead_worker.weights.progress import Progress, no_progress

SIZES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens of the graphs at most: powers of two and the midpoints between them. A graph of 16 layers has 17 pieces."""
TURNS = 3
"""Measurements of a plain step; the shortest time counts."""
SLACK = 1.1
"""A step waits for the host if it is computed this much later than its last launch, at most."""
MOST_SECONDS = 20.0
"""Time limit of a recording. The largest sizes come first, and smaller steps are padded to them."""

logger = logging.getLogger(__name__)


@dataclass
class PieceSizes:
    """The sizes of one start: chosen at the first recording and kept, so that the next one takes no more memory than was measured."""

    most: int
    """Tokens of the largest size."""
    chosen: list[int] | None = None
    """None: not chosen yet."""
    failure: str = ""
    """Why the pieces cannot be recorded; empty if they can."""


class PiecewiseGraphs:
    """The pieces of a forward pass on a FlashInfer backend, for each of some sizes."""

    def __init__(self, forward: SplitForward, backend: FlashInferBackend, context: int, recorder: Recorder) -> None:
        """`context`: tokens of the longest request. `recorder`: of the graphs for decodes, whose memory the pieces share."""
        self._forward, self._backend, self._context, self._recorder = forward, backend, context, recorder
        self.sizes: list[int] = []
        """Recorded sizes, ascending."""
        self._replays: dict[int, Callable[[], Any]] = {}
        self._parts: list[StepPart] = []
        """Attention of the step that runs."""
        self._padding = backend.padding_page * backend.spec.page_size

    @torch.inference_mode()
    def choose_sizes(self, most: int) -> list[int]:
        """Return the sizes up to `most` whose plain steps wait for the host: their launches take as long as all of their kernels.

        A step that is padded to such a size is computed no later than without graphs.
        """
        chosen = []
        for size in SIZES:
            if size > most:
                break
            issued, computed = self._time(size)
            if computed > SLACK * issued:
                logger.info("launches are not the limit from %d tokens on: %.1f of %.1f ms", size, issued * 1e3, computed * 1e3)
                break
            chosen.append(size)
        return chosen

    def _time(self, size: int) -> tuple[float, float]:
        """Return the seconds in which a plain step of `size` tokens is launched, and in which it is computed."""
        step, times = self._trial_step(size), []
        for _ in range(1 + TURNS):
            context = self._backend.plan(step)
            self._wait()
            began = time.perf_counter()
            self._forward.run_body(step, context)
            issued = time.perf_counter() - began
            self._wait()
            times.append((issued, time.perf_counter() - began))
        issued, computed = (min(kind) for kind in zip(*times[1:], strict=True))
        return issued, computed

    def _wait(self) -> None:
        if self._backend.spec.device.type == "cuda":
            torch.cuda.synchronize(self._backend.spec.device)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], progress: Progress = no_progress) -> None:
        """Record every size, largest first, so that smaller ones fit into its memory. Raises what cannot be recorded."""
        if not sizes:
            return
        self._allocate(max(sizes))
        ends = time.monotonic() + MOST_SECONDS
        for done, size in enumerate(sorted(sizes, reverse=True)):
            if time.monotonic() > ends:
                logger.warning("piecewise CUDA graphs for less than %d tokens are not recorded: %g s are over", self.sizes[0], MOST_SECONDS)
                break
            progress("capture", 100 * done // len(sizes))
            step = self._trial_step(size)
            self._fill(step, size)
            _, self._parts = self._backend.plan_parts(step)
            self._replays[size] = self._recorder.record_pieces(lambda cut, size=size: self._run_body(size, cut))  # type: ignore[misc]  # a default
            self.sizes.insert(0, size)
        progress("capture", 100)
        logger.info("piecewise CUDA graphs for steps of %s tokens with prompts", ", ".join(map(str, self.sizes)))

    def run(self, step: PackedStep) -> torch.Tensor | None:
        """Return logits [S, vocabulary] of `step`; None if no size fits, or if a row has an adapter."""
        tokens = len(step.tokens)
        size = next((size for size in self.sizes if size >= tokens), 0)
        if not size or step.adapters:
            return None
        self._fill(step, size)
        _, self._parts = self._backend.plan_parts(step)
        return self._forward.run_head(self._replays[size](), step.sampling)

    def _allocate(self, most: int) -> None:
        """Allocate what all sizes share; each uses its first tokens."""
        backend, spec = self._backend, self._backend.spec
        device, pages = spec.device, backend.pages + 1
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.zeros(spec.num_groups, most, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(most, dtype=torch.int32, device=device)
        # One row that has all pages in their order: the position of a token in it is its storage slot.
        self._indptr = to_device([0, pages], device, torch.int32)
        self._pages = torch.arange(pages, dtype=torch.int32, device=device)
        self._last_page_len = torch.full((1,), spec.page_size, dtype=torch.int32, device=device)
        self._queries = {kind: torch.zeros(most, kind.heads, kind.key_dim, dtype=spec.dtype, device=device) for kind in backend.kinds}
        self._outputs = {kind: torch.zeros(most, kind.heads, kind.value_dim, dtype=spec.dtype, device=device) for kind in backend.kinds}

    def _fill(self, step: PackedStep, size: int) -> None:
        """Copy the inputs of `step` to where the pieces read them, and pad them to `size` tokens."""
        tokens = len(step.tokens)
        for memory, values, padding in (
            (self._tokens, step.tokens, 0),
            (self._positions, step.positions, 0),
            *((memory, each.slots, self._padding) for memory, each in zip(self._slots, step.of_groups(), strict=True)),
        ):
            memory[:tokens].copy_(values)
            memory[tokens:size].fill_(padding)
        for output in self._outputs.values():  # attention does not write them, and a number that is none could spread (tokenspeed#741)
            output[tokens:size].zero_()

    def _run_body(self, size: int, cut: Cut) -> Any:
        step = PackedStep(
            tokens=self._tokens[:size],
            positions=self._positions[:size],
            slots=self._slots[0, :size],
            starts=(),
            counts=(),
            page_indptr=torch.zeros(1, dtype=torch.int32),
            page_indices=torch.zeros(0, dtype=torch.int32),
            sampling=self._tokens[:0],
        )
        stores = [
            Paging(
                query_indptr=self._indptr,
                page_indptr=self._indptr,
                page_indices=self._pages,
                last_page_len=self._last_page_len,
                rows=self._zeros[:size],
                positions=slots[:size],
                single=False,
                zeros=self._zeros[:size],
            )
            for slots in self._slots
        ]
        queries, outputs = ({kind: part[:size] for kind, part in parts.items()} for parts in (self._queries, self._outputs))
        return self._forward.run_body(step, _PieceContext(self._backend, stores, queries, outputs, cut, self._attend))

    def _attend(self, layer: int, queries: torch.Tensor, output: torch.Tensor) -> None:
        self._backend.run_parts(self._parts, layer, queries, output)

    def _trial_step(self, size: int) -> PackedStep:
        """Return prompts of `size` tokens together, on the padding page."""
        device, page_size = self._backend.spec.device, self._backend.spec.page_size
        counts = [self._context] * (size // self._context) + [size % self._context] * bool(size % self._context)
        positions = torch.cat([torch.arange(count, device=device) for count in counts])
        lengths = torch.tensor([0, *(-(-count // page_size) for count in counts)], dtype=torch.int32)
        indptr = lengths.cumsum(0, dtype=torch.int32)
        pages = GroupPages(
            self._padding + positions % page_size, torch.full((int(indptr[-1]),), self._backend.padding_page, dtype=torch.int32)
        )
        return PackedStep(
            tokens=torch.zeros(size, dtype=torch.int64, device=device),
            positions=positions,
            slots=pages.slots,
            starts=[0] * len(counts),
            counts=counts,
            page_indptr=indptr,
            page_indices=pages.page_indices,
            sampling=torch.zeros(0, dtype=torch.int64, device=device),
            others=[pages] * (self._backend.spec.num_groups - 1),
        )


@dataclass(frozen=True, slots=True)
class _PieceContext:
    """Implements `StepContext` for a recording."""

    backend: FlashInferBackend
    stores: Sequence[Paging]
    """Of each group of layers."""
    queries: dict[LayerSpec, torch.Tensor]
    outputs: dict[LayerSpec, torch.Tensor]
    cut: Cut
    run: Callable[[int, torch.Tensor, torch.Tensor], None]
    """Attends in a layer, from queries to output."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        kind, run = self.backend.spec.layers[layer], self.run
        queries, output = self.queries[kind], self.outputs[kind]
        self.backend.store(layer, self.stores[self.backend.keys_of[layer][0]], key, value)
        queries.copy_(query)
        self.cut(lambda: run(layer, queries, output))
        return output.to(query.dtype)


def record_pieces(
    graphs: GraphedDecodes | None,
    forward: Forward,
    backend: Backend,
    context: int,
    sizes: PieceSizes,
    progress: Progress = no_progress,
    largest: int = 0,
) -> PiecewiseGraphs | None:
    """Return recorded pieces for steps with prompts; None if there are none: no graphs for decodes, no size, or `sizes.failure`.

    largest: only that many sizes; 0: all.
    """
    if graphs is None or not graphs.is_recorded or not sizes.most or sizes.failure:
        return None
    plain = forward.plain if isinstance(forward, AdaptedForward) else forward
    assert isinstance(backend, FlashInferBackend), "decodes are recorded"
    try:
        if not isinstance(plain, SplitForward) or not plain.can_score:
            raise TypeError("the model has no head that runs apart from its body")
        made = PiecewiseGraphs(plain, backend, context, graphs.recorder)
        if sizes.chosen is None:
            sizes.chosen = made.choose_sizes(sizes.most)
        made.capture(sizes.chosen[-largest:], progress)
    except Exception as error:  # whatever a kernel raises that cannot be recorded
        sizes.failure = f"steps with prompts cannot be recorded: {describe_failure(error)}"
        logger.warning("steps with prompts run without CUDA graphs: %s", sizes.failure)
        if backend.spec.device.type == "cuda":  # a plan that was cut short left copies that no event stands for
            torch.cuda.synchronize(backend.spec.device)
        return None
    if not largest:
        sizes.chosen = made.sizes
    return made if made.sizes else None
