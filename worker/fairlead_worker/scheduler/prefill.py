"""The prefill of a step: the next chunk of the partly prefilled request, then admissions, within one budget."""

from bisect import insort
from collections.abc import Sequence
from contextlib import closing

from msgspec import Struct

from fairlead_worker.cache.grouped import GroupedPrefixCache
from fairlead_worker.cache.node import Node
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.cache.states import StatePrefixCache
from fairlead_worker.scheduler.admission_control import AdmissionControl
from fairlead_worker.scheduler.background import Urgency
from fairlead_worker.scheduler.budget import OutputReserve, Share, StepBudget
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.plan import Row
from fairlead_worker.scheduler.queue.waiting_queue import WaitingQueue
from fairlead_worker.scheduler.request import Request, by_arrival, lease_of
from fairlead_worker.scheduler.stats import EngineStats


class PrefillStep(Struct, frozen=True, eq=False):
    """The prefill of one step."""

    rows: Sequence[Row] = ()
    tokens: int = 0
    work: float = 0.0
    """Positions of the tokens, summed."""


NO_PREFILL = PrefillStep()


class Prefill:
    """Owns the partly prefilled request and the admissions."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        waiting: WaitingQueue,
        running: list[Request],
        reserve: OutputReserve,
        admission: AdmissionControl,
        stats: EngineStats,
        urgency: Urgency,
    ) -> None:
        """`running`: by arrival. Admitted requests are added to it."""
        self.chunked_req: Request | None = None
        """The only running request that is partly prefilled. Every other one has exactly one token to compute."""
        self._config = config
        self._cache = cache
        self._groups = cache if isinstance(cache, GroupedPrefixCache) else None
        self._states = cache if isinstance(cache, StatePrefixCache) else None
        self._waiting = waiting
        self._running = running
        self._reserve = reserve
        self._admission = admission
        self._stats = stats
        self._urgency = urgency
        self._page_size = cache.page_size

    @property
    def is_pending(self) -> bool:
        """Whether there is a prompt to compute."""
        return self.chunked_req is not None or len(self._waiting) > 0

    @property
    def backlog_tokens(self) -> int:
        """Tokens that remain of the partly prefilled request."""
        return self.chunked_req.uncomputed if self.chunked_req is not None else 0

    def plan(self, budget: StepBudget) -> PrefillStep:
        """Choose the prefill of a step: the next chunk, then admissions. The chunk always fits: admission leased its pages."""
        rows: list[Row] = []
        chunked = self.chunked_req
        if chunked is not None:
            count = budget.cut(chunked.uncomputed, chunked.computed, self._share_of(chunked))
            if self._groups is not None:
                count = self._groups.grow_chunk(lease_of(chunked), chunked.computed, count)
                if not count:  # decodes hold all window pages, and give them back
                    return NO_PREFILL
            self._waiting.record_prefill(chunked, count)
            rows.append(self._cut(chunked, count, budget))
        if len(self._waiting):
            self._admit_waiting(rows, budget)
        return PrefillStep(rows, budget.spent, budget.work)

    def drop(self, request: Request) -> None:
        """Forget a request that no longer runs."""
        if request is self.chunked_req:
            self.chunked_req = None

    def _admit_waiting(self, rows: list[Row], budget: StepBudget) -> None:
        """Admit waiting requests in policy order while tokens and pages last, and add their rows."""
        self._waiting.refresh()
        if len(self._running) >= self._config.max_num_seqs or budget.left <= 0:
            return
        if not self._running:
            self._reserve.reset()
            self._waiting.reset_running()
        with closing(self._waiting.candidates()) as candidates:
            for request in candidates:
                if len(self._running) >= self._config.max_num_seqs:
                    return
                assert request.prefix_match is not None, f"policy {self._config.policy} yielded request {request.id}, which does not wait"
                node = self._cache.match(request.prefix_match)
                cached = node.depth * self._page_size
                count = budget.cut(len(request.tokens) - cached, cached, self._share_of(request))
                if not count:
                    return
                if self._admission.missing_pages(request, node) <= 0:
                    count = self._admit(request, node, count)
                    rows.append(self._cut(request, count, budget))

    def _share_of(self, request: Request) -> Share:
        """Return what the request may have of the step. A turn is a chunk, because the bound on waiting counts it as one."""
        if not self._urgency.is_background(request.submit.priority, self._stats.steps) or request.history.lost_pages:
            return "rest"
        return "turn" if self._waiting.is_due(request) else "background"

    def _admit(self, request: Request, node: Node, count: int) -> int:
        """Lease pages for all known tokens of a request, and share those down to `node`. `count`: tokens that this step may compute.

        Return how many it computes. Window pages are leased for these only, and may suffice for fewer.
        """
        self._admission.start(request, node)
        lease = request.lease = self._cache.attach(node)  # before the match is untracked: one of the two must keep the tree
        history, stats = request.history, self._stats
        history.cached = request.computed = shown = node.depth * self._page_size
        if self._states is not None:
            assert request.prefix_match is not None, "it waits"
            shown = self._states.begin(lease, request.prefix_match)
        self._waiting.remove_admitted(request, count)
        if self._groups is None:
            self._cache.grow(lease, len(request.tokens))
        else:
            shown = self._groups.shown_tokens(node)  # before the growth evicts
            self._groups.reserve(lease, len(request.tokens))
            count = self._groups.grow_chunk(lease, request.computed, count)
        history.awaiting_first_token, history.lost_pages = True, False
        if history.first_cached is None:
            history.first_cached = history.cached
            history.first_loaded = lease.loaded * self._page_size
            history.first_hidden = history.cached - shown
            stats.host_cached_tokens += history.first_loaded
            stats.prompt_tokens += request.prompt_length
            stats.cached_tokens += history.cached
        else:
            stats.recomputed_tokens += max(history.lost - history.cached, 0)
        insort(self._running, request, key=by_arrival)
        return count

    def _cut(self, request: Request, count: int, budget: StepBudget) -> Row:
        """Return a row with the next `count` tokens. An incomplete request becomes `chunked_req` and reserves no output yet."""
        budget.spend(count, request.computed)
        is_whole = count == request.uncomputed
        if is_whole:
            self.drop(request)
            self._reserve.add(request)
        else:
            assert self.chunked_req in (None, request), "one partly prefilled request at a time"
            self.chunked_req = request
            budget.left = 0  # the tokens lost to page rounding stay unused: a second prompt would be cut too
        lease, end = lease_of(request), request.computed + count
        samples = is_whole and request.pool is None
        published_end = end - 1 if samples else end  # the last position is computed again if its token is late
        if 0 < self._config.dedupe_tokens <= published_end:
            self._cache.insert_pending(lease, request.tokens, published_end)
        return Row(request, request.computed, count, lease.pages, samples)
