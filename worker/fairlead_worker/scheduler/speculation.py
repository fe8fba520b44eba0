"""Speculative decoding, the scheduler's side: how many tokens of which request are guessed ahead, and what came of it.

A decode that speculates is a row of 1 + k tokens, verified in the same packed step as everything else. The model's own choice is made
at each of its positions, from that position's logits and noise, and the draft is accepted as far as it says the same. So a request's
tokens are those that it would have had without speculation: not only distributed alike, but the same ones. For drafts that are certain
of themselves (a look-up, a greedy draft model) that accepts exactly as often as the rejection sampling of Leviathan et al. (2023): a
guess x with the probability p(x), and what is chosen instead is distributed as p without x.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fairlead_worker.cache.prefix import Lease, PrefixCache
from fairlead_worker.messages import Drafts
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.ngram import NgramIndex
from fairlead_worker.scheduler.plan import Row, StepPlan, StepResult
from fairlead_worker.scheduler.request import Request

_KEEP = 0.9
"""Weight of the past in a request's acceptance: half of it comes from its last seven drafts."""
_FIRST_RATE, _FIRST_WEIGHT = 0.7, 2.0
"""What is expected of a request before anything is known, and how many tokens' worth of knowledge that is."""
_FORGET = 0.999
"""Weight of the past in a draft model's cost while nothing is drafted: one that seemed too slow is tried again."""
_LEAST_SHARE = 0.05
"""A guess less likely than this is not made, however idle the machine."""
_PROBE_SHARE = 0.5
"""Above this share of the step that grows with its tokens, a request whose drafts fail is not tried again."""
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64
"""Steps without a draft after a probe has failed: twice as many each time."""


@dataclass(slots=True)
class Drafting:
    """How well one request is guessed, and the index that does it."""

    index: NgramIndex | None
    accepted: float = _FIRST_RATE * _FIRST_WEIGHT
    tried: float = _FIRST_WEIGHT
    pause: int = _FIRST_PAUSE
    wait: int = 0
    """Steps until the next probe, once nothing is drafted any more."""

    def choose_length(self, share: float, max_drafts: int) -> int:
        """How many tokens to guess, where one more must be right with a probability of `share` to be worth its time."""
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
        """Takes in a draft's fate. Tokens behind the first wrong one say nothing."""
        self.accepted = _KEEP * self.accepted + accepted
        self.tried = _KEEP * self.tried + min(accepted + 1, drafted)
        self.pause = _FIRST_PAUSE if accepted else min(2 * self.pause, _LONGEST_PAUSE)
        self.wait = 0 if accepted else self.pause


class Speculation:
    """Decides on drafts at the end of each plan, from what nobody else wanted of the step's pages; counts them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._max_drafts = config.speculative_num_tokens
        self._uses_ngrams = config.speculative_method == "ngram"
        self._break_even = config.speculative_break_even
        self._draft_cost = 0.0
        """Recent time of one forward pass of the draft model, in steps of the model itself; 0 for look-ups."""
        self._rounds = self._tokens = self._accepted = 0
        self._accepted_at = [0] * self._max_drafts

    def extend(self, plan: StepPlan, rows: Sequence[Row], cache: PrefixCache) -> None:
        """Lets the decodes `rows` of `plan` speculate: tokens that are guessed, or leave to have them guessed by the runner.

        A step takes a fixed time and a time for each token in it, so a guess is worth it while its chance exceeds the share of the
        second in the step: on a machine with time to spare nearly always, in a large batch or beside a chunk hardly ever.
        """
        tokens = plan.prefill_tokens + plan.decodes
        own_cost = self._draft_cost / len(rows)
        for row in rows:
            share = max(tokens / (tokens + self._break_even) + own_cost, _LEAST_SHARE)
            if share >= 1.0:
                return
            request = row.request
            if request.drafting is None:
                request.drafting = Drafting(self._index(request) if self._uses_ngrams else None)
            count = min(request.drafting.choose_length(share, self._max_drafts), request.length_limit - len(request.tokens) - 1)
            if count <= 0:
                continue
            assert request.lease is not None, "it runs"
            count = min(count, len(request.lease.pages) * cache.page_size - len(request.tokens) + cache.available * cache.page_size)
            if count <= 0:
                continue
            if request.drafting.index is not None:
                row.draft = request.drafting.index.propose(count)
                count = len(row.draft)
                if not count:
                    continue
            cache.grow(request.lease, len(request.tokens) + count)
            row.count = 1 + count
            request.fast_until = 0  # its result is no plain token: `advance` must look at it
            plan.drafted += count
            plan.decode_context += count * row.start
            tokens += count

    def finish_row(self, row: Row, lease: Lease) -> None:
        """A decode has come back, and its request has the tokens. From now on it is a plain one again, with no page more than one."""
        request, drafted = row.request, row.count - 1
        accepted = len(request.tokens) - row.start - 2
        row.count, row.draft = 1, ()
        lease.trim(len(request.tokens))
        # Its alarm went off for another reason, the draft model is still behind, or its mask was late.
        if not drafted or accepted < 0 or request.drafting is None:
            return
        request.drafting.observe(drafted, accepted)
        self._rounds += 1
        self._tokens += drafted
        self._accepted += accepted
        for place in range(accepted):
            self._accepted_at[place] += 1

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """What drafting cost, as the runner measured it."""
        target_seconds = result.seconds - result.draft_seconds
        if not result.draft_forwards:
            self._draft_cost *= _FORGET
        elif target_seconds > 0 and not plan.prefill_tokens:
            self._draft_cost = _KEEP * self._draft_cost + (1 - _KEEP) * result.draft_seconds / result.draft_forwards / target_seconds

    def counts(self) -> Drafts:
        """Totals, for /metrics."""
        return Drafts(self._rounds, self._tokens, self._accepted, tuple(self._accepted_at))

    def _index(self, request: Request) -> NgramIndex:
        return NgramIndex(request.tokens, self._config.speculative_ngram_min, self._config.speculative_ngram_max)
