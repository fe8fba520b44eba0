"""The scheduler's side of speculative decoding: chooses how many tokens to draft for each request, and tracks their acceptance.

A speculating decode is a row of 1 + k tokens, verified in the same packed step as all other rows. The model samples at each position, from
that position's logits and noise, and the draft is accepted as long as it equals the samples. So a request gets exactly the tokens that it
would get without speculation, not only the same distribution. For deterministic drafts (n-gram lookup, a greedy draft model) this accepts
as often as the rejection sampling of Leviathan et al. (2023): a draft x is accepted with probability p(x), and its replacement is
distributed as p without x.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.ipc.messages import Drafts
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.ngram import NgramIndex
from fairlead_worker.scheduler.plan import Row, StepPlan, StepResult
from fairlead_worker.scheduler.request import Request, lease_of

_KEEP = 0.9
"""Weight of the past in a request's acceptance rate: half of it comes from the last seven drafts."""
_FIRST_RATE, _FIRST_WEIGHT = 0.7, 2.0
"""The initial acceptance rate of a request, and its weight in tokens."""
_FORGET = 0.999
"""Decay of the draft model's cost while nothing is drafted, so that a model that seemed too slow is tried again."""
_LEAST_SHARE = 0.05
"""Drafts less likely than this are never made, even on an idle machine."""
_PROBE_SHARE = 0.5
"""Above this share of the step time that grows with tokens, a request with failing drafts is not probed again."""
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64
"""Steps without a draft after a failed probe; doubles with each failure."""


@dataclass(slots=True)
class Drafting:
    """Acceptance statistics of one request, and its n-gram index."""

    index: NgramIndex | None
    accepted: float = _FIRST_RATE * _FIRST_WEIGHT
    tried: float = _FIRST_WEIGHT
    pause: int = _FIRST_PAUSE
    wait: int = 0
    """Steps until the next probe, while nothing is drafted."""

    def choose_length(self, share: float, max_drafts: int) -> int:
        """Return how many tokens to draft. Each must be accepted with a probability of at least `share` to be worth its time."""
        rate = self.accepted / self.tried
        chance, count = rate, 0
        while count < max_drafts and chance >= share:
            count += 1
            chance *= rate
        if count or share > _PROBE_SHARE:
            return count
        if self.wait:
            self.wait -= 1
            return 0
        return 1

    def observe(self, drafted: int, accepted: int) -> None:
        """Update the statistics by one verified draft. Tokens after the first rejected one carry no information."""
        self.accepted = _KEEP * self.accepted + accepted
        self.tried = _KEEP * self.tried + min(accepted + 1, drafted)
        self.pause = _FIRST_PAUSE if accepted else min(2 * self.pause, _LONGEST_PAUSE)
        self.wait = 0 if accepted else self.pause


class Speculation:
    """Gives drafts to the decodes of a step, with the pages that are still free, and counts them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._max_drafts = config.speculative_num_tokens
        self._uses_ngrams = config.speculative_method == "ngram"
        self._break_even = config.speculative_break_even
        self._draft_cost = 0.0
        """Recent time of one draft forward pass, in steps of the target model; 0 for n-gram lookup."""
        self._drafting: dict[Request, Drafting] = {}
        self._rounds = self._tokens = self._accepted = 0
        self._accepted_at = [0] * self._max_drafts

    def draft(self, rows: Sequence[Row], prefill_tokens: int, cache: PrefixCache) -> list[Row]:
        """Return the decode `rows` of a step, with drafts where they pay: n-gram tokens, or room for tokens of the runner's draft model.

        A step takes a fixed time plus a time per token. A draft token is worth it while its acceptance probability exceeds the share of
        the per-token time: nearly always on an idle machine, hardly ever in a large batch or beside a chunk.
        """
        tokens = prefill_tokens + len(rows)
        own_cost = self._draft_cost / max(len(rows), 1)
        drafted = list(rows)
        for place, row in enumerate(rows):
            share = max(tokens / (tokens + self._break_even) + own_cost, _LEAST_SHARE)
            if share >= 1.0:
                break
            request, lease = row.request, lease_of(row.request)
            drafting = self._drafting.get(request)
            if drafting is None:
                drafting = self._drafting[request] = Drafting(self._index(request) if self._uses_ngrams else None)
            known = len(request.tokens)
            count = min(drafting.choose_length(share, self._max_drafts), request.length_limit - known - 1)
            if count <= 0:
                continue
            count = min(count, (len(lease.pages) + cache.available) * cache.page_size - known)
            if count <= 0:
                continue
            draft = drafting.index.propose(count) if drafting.index is not None else None
            if draft is not None:
                count = len(draft)
                if not count:
                    continue
            count = cache.take_drafts(lease, count)
            if not count:
                continue
            cache.grow(lease, known + count)
            request.fast_until = 0  # `finish_row` follows
            drafted[place] = row.with_draft(count, draft[:count] if draft is not None else ())
            tokens += count
        return drafted

    def finish_row(self, row: Row) -> None:
        """Count a verified draft, and free the draft's pages. The request has its tokens already."""
        request, drafted = row.request, row.count - 1
        accepted = len(request.tokens) - row.start - 2
        lease_of(request).trim(len(request.tokens))
        drafting = self._drafting.get(request)
        # The row had no draft: another reason for the slow path, a draft model that is behind, or a late mask.
        if not drafted or accepted < 0 or drafting is None:
            return
        drafting.observe(drafted, accepted)
        self._rounds += 1
        self._tokens += drafted
        self._accepted += accepted
        for place in range(accepted):
            self._accepted_at[place] += 1

    def forget(self, request: Request) -> None:
        """Drop the statistics of a request that ended."""
        self._drafting.pop(request, None)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Update the cost of drafting by the runner's measurement."""
        target_seconds = result.seconds - result.draft_seconds
        if not result.draft_forwards:
            self._draft_cost *= _FORGET
        elif target_seconds > 0 and not plan.prefill_tokens:
            self._draft_cost = _KEEP * self._draft_cost + (1 - _KEEP) * result.draft_seconds / result.draft_forwards / target_seconds

    def counts(self) -> Drafts:
        """Return the totals, for /metrics."""
        return Drafts(self._rounds, self._tokens, self._accepted, tuple(self._accepted_at))

    def _index(self, request: Request) -> NgramIndex:
        return NgramIndex(request.tokens, self._config.speculative_ngram_min, self._config.speculative_ngram_max)
