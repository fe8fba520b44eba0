"""The token budget of one step, and the output reserve of running requests. SGLang's PrefillAdder in two small parts."""

from typing import Literal

from fairlead_worker.scheduler.chunk_sizer import PrefillBudget, least_chunk, prefill_work
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.request import Request

Share = Literal["rest", "turn", "background"]
"""What a prompt may have of a step: all that is left, a chunk, or the small part of background prompts (`background.py`)."""
IDLE_SECONDS = 1.0
"""Target duration of a prefill-only step that holds several chunks."""


def idle_tokens(config: SchedulerConfig, prefill_rate: float) -> int:
    """Return the tokens that a step may prefill while nothing decodes. `prefill_rate`: measured, in tokens per second.

    Chunks exist to protect decodes, so an idle step may hold several. New requests wait for the step to end, so about one second
    (`IDLE_SECONDS`) of prefill is the limit above one chunk.
    """
    size = config.chunked_prefill_size
    return max(size, min(size * config.idle_prefill_chunks, int(IDLE_SECONDS * prefill_rate)))


class StepBudget:
    """Prefill tokens left in one step. Each decode takes one token from the chunk.

    An eighth of the chunk is left for prefill with any number of decodes, so prompts always progress.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        page_size: int,
        decodes: int,
        prefill_budget: PrefillBudget | None = None,
        idle: int = 0,
        background: PrefillBudget | None = None,
    ) -> None:
        """`prefill_budget`: replaces `chunked_prefill_size` in this step.
        `idle`: replaces it if no request decodes, in this step or after it; 0: requests decode.
        `background`: the prefill of the step beyond which no background prompt is added; None: no limit."""
        self._background = background
        self._chunk = max(config.chunked_prefill_size, page_size)
        self._chunking = config.chunked_prefill_size > 0 and config.keeps_kv
        self._page_size = page_size
        self._prefill_budget = prefill_budget
        self._max_requests = config.prefill_max_requests
        self.left = config.max_prefill_tokens
        if prefill_budget is not None:
            self.left = max(min(prefill_budget.limit, self.left), page_size)
        elif config.chunked_prefill_size > 0:
            chunk = idle or max(config.chunked_prefill_size - decodes, least_chunk(config, page_size))
            self.left = max(min(chunk, self.left), page_size)
        self.spent = self.prompts = 0
        self.work = 0.0

    def cut(self, tokens: int, start: int, share: Share = "rest") -> int:
        """Return how many of `tokens` prompt tokens from `start` may be computed now: all, a whole number of pages, or none."""
        left = self.left
        if share == "background" and self._background is not None:
            left = min(left, max(self._background.count_fitting(start), self._background.floor - self.spent))
        elif share == "turn" and self._chunking:
            left = min(left, self._chunk)
            if self.spent and tokens > left:
                left = 0  # a turn is a whole chunk: the next step begins with it
        if self._prefill_budget is not None:
            left = min(left, max(self._prefill_budget.count_fitting(start), self._prefill_budget.floor - self.spent))
        if tokens <= left:
            return tokens
        if self._chunking:
            return left // self._page_size * self._page_size
        return 0 if self.spent else tokens

    def spend(self, tokens: int, start: int) -> None:
        """Charge `tokens` of one more prompt from `start`. The budget is empty after `prefill_max_requests` prompts."""
        self.prompts += 1
        self.left = self.left - tokens if self.prompts != self._max_requests else 0
        self.spent += tokens
        self.work += prefill_work(start, tokens)
        for budget in (self._prefill_budget, self._background):
            if budget is not None:
                budget.spend(start, tokens)


class OutputReserve:
    """Output tokens that running requests may still produce, and the share of them that keeps pages free (`new_token_ratio`).

    Requests seldom produce all of max_tokens. The ratio estimates how much they do: it decays with each step, and rises after a
    preemption.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._clip = config.clip_max_new_tokens
        self._initial = config.initial_new_token_ratio
        self._min = min(config.min_new_token_ratio, self._initial)
        self._decay = (self._initial - self._min) / max(config.new_token_ratio_decay_steps, 1)
        self.ratio = self._initial
        self.tokens = 0

    def estimate(self, request: Request) -> int:
        """Return the output tokens that `request` may still produce, clipped."""
        return max(min(request.length_limit - request.length, self._clip), 0)

    def pages_to_keep(self, extra: int, page_size: int) -> int:
        """Return the pages to keep free for the running requests and one more with `extra` output tokens."""
        return -(-int((self.tokens + extra) * self.ratio) // page_size)

    def add(self, request: Request) -> None:
        """Count the estimated output of a request."""
        estimate = self.estimate(request)
        request.reserved_end = request.length + estimate
        self.tokens += estimate

    def consume(self, tokens: int) -> None:
        """Remove tokens that counted requests have produced."""
        self.tokens -= tokens

    def renew(self, request: Request) -> None:
        """Count the output of a request again if it has produced all that was counted."""
        if request.length >= request.reserved_end:
            self.drop(request)
            self.add(request)

    def drop(self, request: Request) -> None:
        """Stop counting the output of a request."""
        self.tokens -= request.reserved
        request.reserved_end = 0

    def decay(self) -> None:
        """Lower the ratio after a step without preemption."""
        self.ratio = max(self.ratio - self._decay, self._min)

    def raise_ratio(self, running: list[Request]) -> None:
        """Raise the ratio after pages ran out: to what the running requests have produced, plus 20 steps (SGLang's)."""
        written = sum(request.output_length + 20 for request in running)
        total = sum(request.length_limit - request.prompt_length for request in running)
        self.ratio = min(max(self.ratio + 0.1, written / max(total, 1)), 1.0)

    def reset(self) -> None:
        """Restore the initial ratio. Call it when nothing runs, because the next requests are new."""
        self.ratio = self._initial
