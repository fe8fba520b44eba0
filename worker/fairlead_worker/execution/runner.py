"""Model runner: executes a step plan and returns the sampled tokens."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from fairlead_worker.cache.states import StateSlots
from fairlead_worker.execution.adapted import AdaptedForward
from fairlead_worker.execution.cuda_graphs.decodes import Choice, GraphedDecodes, run_step
from fairlead_worker.execution.cuda_graphs.piecewise import PiecewiseGraphs
from fairlead_worker.execution.draft import Drafter, Drafts
from fairlead_worker.execution.followers import Followers
from fairlead_worker.execution.forward import Forward, HiddenStates, choose_forward, plain_forward
from fairlead_worker.execution.host import HostStore
from fairlead_worker.execution.native_forward import NativeForward
from fairlead_worker.execution.pack import pack, pack_groups, pack_states
from fairlead_worker.execution.pooling import places_to_pool, pool
from fairlead_worker.execution.scoring import positions_to_score, score
from fairlead_worker.ipc.messages import TokenLogprobs
from fairlead_worker.kernels.base import Backend, PackedStep
from fairlead_worker.kernels.states import StatefulBackend
from fairlead_worker.kernels.transfer import to_device, watch
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.sampling.fused import FusedSampler
from fairlead_worker.sampling.grammars import Grammars
from fairlead_worker.sampling.masks import Masks
from fairlead_worker.sampling.sampler import sample
from fairlead_worker.sampling.verify import verify
from fairlead_worker.scheduler.plan import Row, StepPlan, StepResult

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
        chosen = choose_forward(loaded, backend, native_decoder)
        self.attention = type(backend.attention if isinstance(backend, StatefulBackend) else backend).__name__
        """Class of the attention backend."""
        self.path = chosen.path
        """How rows without an adapter are computed."""
        self.forward: Forward = chosen
        if adapters is not None:
            layers = plain_forward(loaded.model) if isinstance(chosen, NativeForward) else chosen
            self.forward = AdaptedForward(chosen, layers, adapters, backend)
        groups = backend.spec.num_groups
        self.pack = pack if groups == 1 else partial(pack_groups, groups=groups)
        self.state_slots: StateSlots | None = None
        """Slots of recurrent states; None: the model has none."""
        if isinstance(backend, StatefulBackend):
            self.pack, self.state_slots = pack_states, backend.store.slots
        self.host = host
        """KV of the host tier; None without a host tier."""
        self.drafter = drafter
        """The draft model; None without one."""
        self.fused_sampler: FusedSampler | None = None
        """Samples with one kernel; None: torch samples."""
        self.grammars = grammars
        """None: no request has a grammar."""
        self.graphs: GraphedDecodes | None = None
        """CUDA graphs for decode-only steps; None: they run eagerly."""
        self.pieces: PiecewiseGraphs | None = None
        """Piecewise CUDA graphs for other steps; None: they run eagerly."""
        self.graph_failure = ""
        """Why some CUDA graphs (for decodes, adapters, drafted tokens or prompts) could not be recorded; empty: they were, or were not
        wanted."""
        self.followers: Followers | None = None
        """The other ranks of a sharded model; None: there are none, or this rank is one of them."""
        self.kv_groups = ""
        """How layers share KV pages, for the status."""
        self.step_tokens = 0
        """Tokens of the largest step that memory has room for; 0: not measured."""
        self.chunk_tokens = 0
        """Tokens of a chunk by the speed of the device; 0: not measured."""

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
        masks = None if grammars is None else grammars.masks(rows, len(rows) < len(plan.rows), watch(logits.device))
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
        constrained = [row for row in rows if row.request.submit.grammar and row.samples]
        if not constrained:
            return None
        self.grammars.begin(constrained)
        return self.grammars

    def _choose(
        self, logits: torch.Tensor, rows: list[Row], drafted: bool, masks: Masks | None
    ) -> tuple[list[list[int]], list[tuple[TokenLogprobs, ...]]]:
        if drafted:
            return verify(logits, rows, masks, self.fused_sampler)
        tokens, logprobs = sample(logits, [row.request for row in rows], masks=masks, fused=self.fused_sampler)
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

        The head runs on the last token of each sampling row, and on every token of a row that speculates. `drafts`: draft tokens that the
        plan lacks.
        """
        return self.run(self._pack(plan, drafts))

    def _pack(self, plan: StepPlan, drafts: Drafts | None) -> PackedStep:
        step = self.pack(plan, self.backend.spec.page_size, self.loaded.device)
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
