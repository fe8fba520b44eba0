"""Model runner: executes a step plan and returns the sampled tokens."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from fairlead_worker.execution.adapted import AdaptedForward
from fairlead_worker.execution.cuda_graphs.decodes import Choice, GraphedDecodes, graphs_for, run_step, unsupported_reason
from fairlead_worker.execution.cuda_graphs.piecewise import PieceSizes, PiecewiseGraphs, record_pieces
from fairlead_worker.execution.draft import Drafter, Drafts
from fairlead_worker.execution.followers import Followers
from fairlead_worker.execution.forward import Forward, HiddenStates, ModuleForward, choose_forward
from fairlead_worker.execution.host import HostStore, make_host_store
from fairlead_worker.execution.kept import KeptLogits, return_logits, slot_bytes
from fairlead_worker.execution.memory import kv_budget
from fairlead_worker.execution.memory_profile import run_largest_draft, run_largest_step
from fairlead_worker.execution.pack import pack
from fairlead_worker.execution.pooling import places_to_pool, pool
from fairlead_worker.execution.scoring import positions_to_score, score
from fairlead_worker.execution.sizing import DeviceMemory, measure_allocation, memory_of, profile_memory
from fairlead_worker.ipc.messages import TokenLogprobs
from fairlead_worker.kernels.base import Backend, KVSpec, PackedStep
from fairlead_worker.kernels.cpu import CpuBackend
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.kernels.registry import make_backend
from fairlead_worker.kernels.transfer import to_device
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.lora.slots import AdapterSlots
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.sampling.device_filters import DeviceFilters, make_device_filters
from fairlead_worker.sampling.grammars import Grammars
from fairlead_worker.sampling.masks import Masks
from fairlead_worker.sampling.penalties import Histories
from fairlead_worker.sampling.sampler import sample
from fairlead_worker.sampling.verify import verify
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.limits import StepLimits, limit_steps
from fairlead_worker.scheduler.plan import Row, StepPlan, StepResult
from fairlead_worker.sharding.group import Group
from fairlead_worker.weights.progress import Progress, no_progress

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs the steps of a loaded model on an attention backend. Implements `scheduler.plan.Runner`."""

    def __init__(
        self,
        loaded: LoadedModel,
        backend: Backend,
        native_decoder: bool = True,
        *,
        host: HostStore | None = None,
        drafter: Drafter | None = None,
        adapters: AdapterSet | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.loaded = loaded
        self.backend = backend
        self.forward: Forward = choose_forward(loaded, backend, native_decoder)
        if adapters is not None:
            modules = self.forward if isinstance(self.forward, ModuleForward) else ModuleForward(loaded.model)
            self.forward = AdaptedForward(self.forward, modules, adapters, backend)
        self.host = host
        """KV of the host tier; None without a host tier."""
        self.drafter = drafter
        """The draft model; None without one."""
        self.histories = Histories()
        self.filters: DeviceFilters | None = None
        """Kernels for top_k and top_p; None: torch."""
        self.grammars = grammars
        """None: no request has a grammar."""
        self.kept: KeptLogits | None = None
        """The last logits of complete prompts; None: none are kept."""
        self.graphs: GraphedDecodes | None = None
        """CUDA graphs for decode-only steps; None: they run eagerly."""
        self.pieces: PiecewiseGraphs | None = None
        """Piecewise CUDA graphs for other steps; None: they run eagerly."""
        self.graph_failure = ""
        """Why some CUDA graphs (for decodes, adapters, drafted tokens or prompts) could not be recorded; empty: they were, or were not
        wanted."""
        self.followers: Followers | None = None
        """The other ranks of a sharded model; None: there are none, or this rank is one of them."""
        self.step_tokens = 0
        """Tokens of the largest step that memory has room for; 0: not measured."""

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows, write their KV, and sample a token for each row that samples.

        A row whose draft was right gets several tokens.
        """
        began = time.perf_counter()
        if not plan:
            return StepResult([])
        if self.host is not None:
            self.host.copy(plan.saves, plan.loads)
        drafting = time.perf_counter()
        plan, drafts = self._draft(plan)
        draft_seconds = time.perf_counter() - drafting
        grammars = None if drafts is not None else self.begin_masks(plan.rows)
        logits, scores, pooled = self._run_with_states(plan, drafts) if plan.scores or plan.pools else (self.logits(plan, drafts), [], {})
        if drafts is not None:  # penalties, grammars and the scheduler need them on the host; the verifying pass runs meanwhile
            waiting = time.perf_counter()
            plan = drafts.read()
            draft_seconds += time.perf_counter() - waiting
            grammars = self.begin_masks(plan.rows)
        rows = [row for row in plan.rows if row.samples]
        masks = None if grammars is None else grammars.masks(rows)
        tokens, logprobs = self._choose(logits, rows, bool(plan.drafted), masks)
        endings = {} if grammars is None or masks is None else grammars.accept(rows, tokens, masks)
        return StepResult(
            tokens,
            logprobs,
            time.perf_counter() - began,
            scores,
            draft_seconds=draft_seconds,
            draft_forwards=0 if self.drafter is None else self.drafter.forwards,
            endings=endings,
            pooled=pooled,
            executed=None if self.drafter is None else plan,
        )

    def _draft(self, plan: StepPlan) -> tuple[StepPlan, Drafts | None]:
        """Return the plan with drafts, and its draft tokens if only the device has them; None: the plan has them."""
        drafts = None if self.drafter is None else self.drafter.draft(plan)
        if drafts is None:
            return plan, None
        if drafts and self.loaded.device.type == "cuda" and self.loaded.ranks == 1:  # other ranks get them from the host
            return drafts.plan, drafts
        return drafts.read(), None

    def begin_masks(self, rows: Sequence[Row]) -> Grammars | None:
        """Start filling the grammar masks of a step with these rows; return None where no row needs a mask."""
        if self.grammars is None or not self.grammars.is_used:
            return None
        constrained = [row for row in rows if row.request.grammar and row.samples]
        if not constrained:
            return None
        self.grammars.begin(constrained)
        return self.grammars

    def _choose(
        self, logits: torch.Tensor, rows: list[Row], drafted: bool, masks: Masks | None
    ) -> tuple[list[list[int]], list[tuple[TokenLogprobs, ...]]]:
        if drafted:
            return verify(logits, rows, self.histories, masks, self.filters)
        tokens, logprobs = sample(logits, [row.request for row in rows], self.histories, masks=masks, filters=self.filters)
        return [[token] for token in tokens], logprobs

    def _run_with_states(
        self, plan: StepPlan, drafts: Drafts | None
    ) -> tuple[torch.Tensor, list[tuple[TokenLogprobs, ...]], dict[str, bytes]]:
        """Compute as `logits`, and return prompt log-probabilities by row and pooled hidden states by request as well."""
        step = self._pack(plan, drafts)
        to_score, targets = positions_to_score(plan)
        places = torch.cat((to_score, places_to_pool(plan)))
        with nullcontext() if self.followers is None else self.followers.run(step, None, places):
            logits, seen = self.forward.score(step, self.backend.plan(step), to_device(places, self.loaded.device))
        if self.followers is not None:
            seen = self.followers.join_states(seen)
        scores = score(plan, targets, seen.logits, self.loaded.vocabulary_size) if plan.scores else []
        if self.kept is not None:
            logits = self.kept.prepare(plan)(logits)
        pooled = pool(plan, seen.states(slice(len(to_score), None))) if plan.pools else {}
        return logits, scores, pooled

    @torch.inference_mode()
    def follow(self, step: PackedStep, graph: Choice | None = None, places: torch.Tensor | None = None) -> HiddenStates | None:
        """Run on a rank other than 0 what rank 0 runs for `step`: `graph`, or the forward pass. Return the hidden states at `places`."""
        if graph is not None:
            assert self.graphs is not None, "all ranks have recorded, or none"
            self.graphs.replay(graph, step)
            return None
        context = self.backend.plan(step)
        if places is None:
            self.forward(step, context)
            return None
        return self.forward.score(step, context, places)[1]

    @torch.inference_mode()
    def logits(self, plan: StepPlan, drafts: Drafts | None = None) -> torch.Tensor:
        """Return logits [sampling positions, vocabulary] of the plan.

        The head runs on the last token of each sampling row, and on every token of a row that speculates. Rows that repeat a prompt have
        kept logits. If there are no other rows, no forward pass runs. `drafts`: draft tokens that the plan lacks.
        """
        complete = return_logits if self.kept is None else self.kept.prepare(plan)
        return complete(None if plan.repeats == len(plan.rows) else self.run(self._pack(plan, drafts)))

    def _pack(self, plan: StepPlan, drafts: Drafts | None) -> PackedStep:
        step = pack(plan, self.backend.spec.page_size, self.loaded.device)
        return step if drafts is None else drafts.fill(step)

    def run(self, step: PackedStep, fill: Callable[[], object] | None = None) -> torch.Tensor:
        """Return the logits of a packed step. Logits from a CUDA graph stay valid until the next step.

        `fill`: puts tokens that the host does not know yet into the step.
        """
        others = self.followers
        if others is None:
            if fill is not None:
                fill()
            return run_step(step, self.forward, self.backend, self.graphs, self.pieces)
        with others.run(step, None if self.graphs is None else self.graphs.choose(step), shares=fill is not None):
            if fill is not None:
                fill()
                others.share(step.tokens)
            return run_step(step, self.forward, self.backend, self.graphs)


def make_runner(
    loaded: LoadedModel,
    *,
    page_size: int,
    backend: str = "auto",
    kv_pages: int = 0,
    kv_cache_bytes: int = 0,
    native_decoder: bool = True,
    host_kv_cache_bytes: int = 0,
    draft: LoadedModel | None = None,
    adapters: AdapterSet | None = None,
    grammars: Grammars | None = None,
    steps: SchedulerConfig | None = None,
    mem_fraction_static: float = 0.92,
    graph_rows: int = 0,
    piece_tokens: int = 0,
    deterministic: bool = False,
    kept_prompts: int = 0,
    progress: Progress = no_progress,
    group: Group | None = None,
    memory: DeviceMemory | None = None,
) -> ModelRunner:
    """Make a runner with KV storage of `kv_pages` pages.

    `kv_pages` 0 means as many pages as `kv_cache_bytes` hold. If that is 0 too, the runner takes what memory has room for. On a GPU that
    room is measured by running the largest step of `steps`, bounded by `mem_fraction_static` (`profile_memory`). If that step does not
    fit, the runner's `step_tokens` is the largest one that does. Without `steps`, and on a CPU, KV takes a share of the free memory.

    `host_kv_cache_bytes`: size of the host tier, see `make_host_store`.

    `draft`: the draft model for the speculation method "draft". Its KV has as many pages, from the same memory.

    `adapters`: LoRA adapters of `loaded`, if its requests may use them.

    `graph_rows`: most decodes in a step that runs as a CUDA graph; 0: no graphs. Their memory is measured together with the largest
    step.

    `piece_tokens`: most tokens of a step with prompts that runs as piecewise CUDA graphs, where graphs help (`piecewise`); 0: none.

    `deterministic`: a row's bits must not depend on the batch. `execution.batch_invariance` verifies it.

    `kept_prompts`: most prompts whose last logits are kept. None are kept with a draft model, which has no KV for their last page, and
    for a sharded model.

    `memory`: memory of the device; None: read from the device.

    `group`: the ranks of a sharded model, which get as many pages as each of them has room for.

    Raises ValueError if not even one page fits, or if the backend is unknown.
    """
    spec = KVSpec(loaded.layers, page_size, loaded.dtype, loaded.device, loaded.kv_scales)
    draft_spec = None if draft is None else KVSpec(draft.layers, page_size, draft.dtype, draft.device)
    page_bytes = spec.page_bytes + (0 if draft_spec is None else draft_spec.page_bytes)
    step_tokens, room = 0, kv_cache_bytes
    failure = adapter_failure = verification_failure = draft_failure = ""  # of a capture
    if not loaded.generates:
        graph_rows = piece_tokens = 0
    if draft is not None or loaded.ranks > 1 or not loaded.generates:
        kept_prompts = 0
    if steps is not None:
        graph_rows = min(graph_rows, StepLimits.from_config(steps, page_size).decode)  # each drafted token is a row of its own
        piece_tokens = min(piece_tokens, StepLimits.from_config(steps, page_size).tokens)
    pieces = PieceSizes(piece_tokens if loaded.ranks == 1 else 0)  # `build.choose_modes` reports this to the user
    verifies = steps is not None and steps.speculative_method != "none"
    drafted_rows = graph_rows if steps is None else min(graph_rows, steps.max_num_seqs)

    def allocate_slots_for(prepared: Backend) -> None:
        if adapters is not None and graph_rows and not unsupported_reason(prepared):
            adapters.allocate_slots()

    memory = memory or memory_of(loaded.device)
    if not kv_pages and not room and steps is not None and memory is not None:

        def attempt(tokens: int) -> None:
            limited = limit_steps(steps, tokens, page_size)
            limits = StepLimits.from_config(limited, page_size)
            trial = ModelRunner(loaded, _prepare(make_backend(backend, spec, 1), no_progress, deterministic), adapters=adapters)
            with nullcontext(0) if adapters is None else adapters.profile_adapter() as adapter:
                run_largest_step(limits, page_size, trial.logits, adapter)
            if draft is not None and draft_spec is not None:
                drafting = ModelRunner(draft, _prepare(make_backend(backend, draft_spec, 1), no_progress), native_decoder)
                run_largest_draft(limits, limited.max_num_seqs, page_size, drafting.logits)

        allocate_slots_for(_prepare(make_backend(backend, spec, 1), progress, deterministic))
        progress("profile", 0)
        usual = StepLimits.from_config(replace(steps, idle_prefill_chunks=1), page_size).tokens
        tokens, least = StepLimits.from_config(steps, page_size).tokens, 2 * page_size
        if loaded.ranks > 1:
            # An out-of-memory error on one rank leaves the others blocked inside the step. So a sharded model tries a single size, which
            # must fit.
            tokens = least = usual
        found = profile_memory(memory, mem_fraction_static, tokens, least, attempt, usual)
        taken = (0 if adapters is None else adapters.pending_bytes()) + kept_prompts * slot_bytes(spec.page_bytes, loaded.vocabulary_size)
        step_tokens, room = found.step_tokens, max(0, found.kv_bytes - taken)
        pieces.most = min(pieces.most, step_tokens)

        def graph_bytes(
            model: LoadedModel, layout: KVSpec, rows: int, batch_invariant: bool = False, adapters: AdapterSet | None = None
        ) -> int:
            tried = ModelRunner(model, _prepare(make_backend(backend, layout, 1), no_progress, batch_invariant), adapters=adapters)
            slots = None if adapters is None else adapters.slots

            def record() -> object:
                nonlocal failure, adapter_failure, verification_failure, draft_failure
                shared = group if model is loaded else None  # a draft model is whole, on rank 0
                verified = verifies and model is loaded
                graphs = _graphs(tried.forward, tried.backend, rows, loaded.max_model_len, progress, slots, verified, shared)
                if model is not loaded:
                    draft_failure = "" if graphs is None else graphs.failure
                    return graphs
                if graphs is not None:
                    failure, adapter_failure = failure or graphs.failure, adapter_failure or graphs.adapter_failure
                    verification_failure = verification_failure or graphs.verification_failure
                return graphs, record_pieces(graphs, tried.forward, tried.backend, loaded.max_model_len, pieces, progress)

            return measure_allocation(memory, record)

        if graph_rows:
            taken = graph_bytes(loaded, spec, graph_rows, deterministic, adapters)
            if draft is not None and draft_spec is not None:
                taken += graph_bytes(draft, draft_spec, drafted_rows)
            room = max(0, room - taken)
        if failure:  # each failed capture leaves its memory allocated in some releases of torch
            graph_rows = drafted_rows = 0
        if draft_failure:  # only of rank 0: graphs of the ranks stay
            drafted_rows = 0
    progress("cache", 0)
    pages = kv_pages or (room if step_tokens else room or kv_budget(loaded.device, loaded.ranks)) // page_bytes
    if group is not None:
        pages = group.least(pages)
    if pages < 1:
        pending = 0 if adapters is None else adapters.pending_bytes()
        raise ValueError(
            f"no memory for KV: one page of {page_size} tokens takes {page_bytes} bytes, and there is room for {room}; "
            "raise --kv-cache-memory-bytes (--mem-fraction-static on a GPU), or free memory"
            + (f"; adapters that are loaded later take {pending}: lower --max-loras or --max-lora-rank" if pending else "")
        )
    kv_backend = _prepare(make_backend(backend, spec, pages), progress, deterministic)
    allocate_slots_for(kv_backend)
    drafter = None
    if draft is not None and draft_spec is not None:
        draft_backend = _prepare(make_backend(backend, draft_spec, pages), progress)
        draft_forward = choose_forward(draft, draft_backend, native_decoder)
        drafter = Drafter(draft_forward, draft, draft_backend, loaded.vocabulary_size)
        drafter.graphs = _graphs(draft_forward, draft_backend, drafted_rows, loaded.max_model_len, progress)
        if drafter.graphs is not None and drafter.graphs.failure:
            draft_failure, drafter.graphs = drafter.graphs.failure, None
    runner = ModelRunner(
        loaded,
        kv_backend,
        native_decoder,
        host=make_host_store(kv_backend, host_kv_cache_bytes),
        drafter=drafter,
        adapters=adapters,
        grammars=grammars,
    )
    runner.step_tokens = step_tokens
    if isinstance(kv_backend, FlashInferBackend):
        runner.filters = make_device_filters(loaded.device)
    if kept_prompts:
        runner.kept = KeptLogits(kept_prompts, kv_backend)
    slots = None if adapters is None or adapter_failure else adapters.slots
    verifies = verifies and not verification_failure
    runner.graphs = _graphs(runner.forward, kv_backend, graph_rows, loaded.max_model_len, progress, slots, verifies, group)
    if runner.graphs is not None:
        failure, adapter_failure = failure or runner.graphs.failure, adapter_failure or runner.graphs.adapter_failure
        verification_failure = verification_failure or runner.graphs.verification_failure
    runner.pieces = record_pieces(runner.graphs, runner.forward, kv_backend, loaded.max_model_len, pieces, progress)
    runner.graph_failure = failure or adapter_failure or verification_failure or draft_failure or pieces.failure
    return runner


def _graphs(
    forward: Forward,
    backend: Backend,
    rows: int,
    context: int,
    progress: Progress,
    slots: AdapterSlots | None = None,
    verifies: bool = False,
    group: Group | None = None,
) -> GraphedDecodes | None:
    """Return recorded graphs for up to `rows` decodes; None where the backend, or that of another rank, cannot have them."""
    if rows and group is not None and (reason := group.agree(unsupported_reason(backend))):
        logger.warning("decodes run without CUDA graphs%s", reason)
        return None
    graphs = graphs_for(forward, backend, rows, context, slots=slots, verifies=verifies, group=group)
    if graphs is not None:
        graphs.capture(progress)
    return graphs


def _prepare(backend: Backend, progress: Progress, batch_invariant: bool = False) -> Backend:
    """Build the kernels of `backend` at startup, not at the first request."""
    if isinstance(backend, CpuBackend):
        backend.batch_invariant = batch_invariant
    if isinstance(backend, FlashInferBackend):
        backend.batch_invariant = batch_invariant
        progress("compile", 0)
        backend.prepare()
    return backend
