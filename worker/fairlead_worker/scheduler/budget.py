"""What one step may still take on, and what the running requests will want of memory. SGLang's PrefillAdder, in two small parts."""

from fairlead_worker.scheduler.chunk_sizer import PrefillBudget, prefill_work
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.request import Request


class StepBudget:
    """Prefill tokens left in one step. Decodes ride along for free, but a chunk gives way to them token for token.

    At least one page is left to prefill however many decodes run: a prompt always gets on.
    """

    __slots__ = ("_chunking", "_max_requests", "_page_size", "_prefill_budget", "left", "prompts", "spent", "work")

    def __init__(
        self, config: SchedulerConfig, page_size: int, decodes: int, prefill_budget: PrefillBudget | None = None, idle: int = 0
    ) -> None:
        """`prefill_budget`: replaces `chunked_prefill_size` in this step. `idle`: what takes its place where nobody
        decodes, in this step or after it; 0: somebody does."""
        self._chunking = config.chunked_prefill_size > 0
        self._page_size = page_size
        self._prefill_budget = prefill_budget
        self._max_requests = config.prefill_max_requests
        self.left = config.max_prefill_tokens
        if prefill_budget is not None:
            self.left = max(min(prefill_budget.limit, self.left), page_size)
        elif self._chunking:
            self.left = max(min(idle or config.chunked_prefill_size - decodes, self.left), page_size)
        self.spent = self.prompts = 0
        self.work = 0.0

    def leave_last_page(self, tokens: int, least: int) -> bool:
        """Bounds what is left so that the last page of a prompt of `tokens` more tokens stays uncomputed. False, and no bound, where fewer
        than `least` of them, or none, would be computed, or chunking is off."""
        count = (tokens - 1) // self._page_size * self._page_size
        if not self._chunking or count < max(least, self._page_size):
            return False
        self.left = min(self.left, count)
        return True

    def cut(self, tokens: int, start: int) -> int:
        """How many of `tokens` prompt tokens from `start` on may be computed now: all, a whole number of pages, or none."""
        left = self.left
        if self._prefill_budget is not None:
            left = min(left, max(self._prefill_budget.tokens(start), self._prefill_budget.floor - self.spent))
        if tokens <= left:
            return tokens
        if self._chunking:
            return left // self._page_size * self._page_size
        return 0 if self.spent else tokens

    def spend(self, tokens: int, start: int) -> None:
        """One more prompt computes `tokens` from `start` on. Nothing is left once there are `prefill_max_requests` of them."""
        self.prompts += 1
        self.left = self.left - tokens if self.prompts != self._max_requests else 0
        self.spent += tokens
        self.work += prefill_work(start, tokens)
        if self._prefill_budget is not None:
            self._prefill_budget.spend(start, tokens)


class OutputReserve:
    """Output tokens that running requests may still write, and the share of them to keep pages for (`new_token_ratio`).

    Requests seldom write all of max_tokens. The ratio is a bet on how much: it falls step by step while the bet holds, and rises when a
    retraction shows that it did not.
    """

    __slots__ = ("_clip", "_decay", "_initial", "_min", "ratio", "tokens")

    def __init__(self, config: SchedulerConfig) -> None:
        self._clip = config.clip_max_new_tokens
        self._initial = config.initial_new_token_ratio
        self._min = min(config.min_new_token_ratio, self._initial)
        self._decay = (self._initial - self._min) / max(config.new_token_ratio_decay_steps, 1)
        self.ratio = self._initial
        self.tokens = 0

    def estimate(self, request: Request) -> int:
        """Output tokens still to come from `request`, clipped."""
        return max(min(request.length_limit - len(request.tokens), self._clip), 0)

    def pages_to_keep(self, extra: int, page_size: int) -> int:
        """Pages to keep for the running requests and one with `extra` tokens to come."""
        return -(-int((self.tokens + extra) * self.ratio) // page_size)

    def add(self, request: Request) -> None:
        estimate = self.estimate(request)
        request.reserved_end = len(request.tokens) + estimate
        self.tokens += estimate

    def consume(self, tokens: int) -> None:
        """Requests in the reserve have put out some of them."""
        self.tokens -= tokens

    def renew(self, request: Request) -> None:
        """It has written all that was counted and goes on: as much again, clipped again."""
        if len(request.tokens) >= request.reserved_end:
            self.drop(request)
            self.add(request)

    def drop(self, request: Request) -> None:
        self.tokens -= request.reserved
        request.reserved_end = 0

    def decay(self) -> None:
        """A step went by without retraction."""
        self.ratio = max(self.ratio - self._decay, self._min)

    def raise_ratio(self, running: list[Request]) -> None:
        """Pages ran out: the running requests have written more than was bet. Bets on what they have shown, plus 20 steps (SGLang's)."""
        written = sum(request.output_length + 20 for request in running)
        total = sum(request.length_limit - request.prompt_length for request in running)
        self.ratio = min(max(self.ratio + 0.1, written / max(total, 1)), 1.0)

    def reset(self) -> None:
        """Nothing runs: the next requests are others, and so is the bet."""
        self.ratio = self._initial
