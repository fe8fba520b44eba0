"""The decoding requests: their rows, the pages that they need next, and the fast path of a decode that only adds a token."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter

from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.ipc.messages import TokenLogprobs
from fairlead_worker.scheduler.budget import OutputReserve
from fairlead_worker.scheduler.plan import Row, StepResult
from fairlead_worker.scheduler.request import Request, lease_of
from fairlead_worker.scheduler.step_outputs import StepOutputs

PLACEHOLDER = 0xFFFFFFFF
"""Placeholder in a request's tokens until the sampled token is read. No vocabulary has this id."""

row_by_arrival = attrgetter("request.arrival")
"""Sort key of rows."""


class DecodeBatch:
    """Owns the rows of decoding requests, which are reused in every step. Only this class moves them.

    A decode that only adds a token takes the fast path: C functions alone until a page fills, and counters once for all rows. These loops
    are most of the scheduler's cost of a step, so each use of them has its own: `advance`, `advance_placeholder` and
    `replace_placeholders`. One generic loop for all three had 0.80 of their speed, and new immutable rows in each step 0.81
    (`python -m bench scheduler/step_cost`, 256 decodes).
    """

    def __init__(self, cache: PrefixCache, reserve: OutputReserve) -> None:
        self.rows: list[Row] = []
        """By arrival. A row has one token to compute."""
        self.growing: list[Row] = []
        """Rows whose token needs a page."""
        self._rows_by_request: dict[Request, Row] = {}
        self._cache = cache
        self._reserve = reserve
        self._page_size = cache.page_size

    def __contains__(self, request: Request) -> bool:
        return request in self._rows_by_request

    # Membership

    def set_next(self, request: Request) -> None:
        """Move the row of a request to its next token, or add one. This also computes how long the fast path stays valid."""
        lease, computed = lease_of(request), request.computed
        row = self._rows_by_request.get(request)
        if row is None:
            row = self._rows_by_request[request] = Row(request, computed, 1, lease.pages, True)
            insort(self.rows, row, key=row_by_arrival)
        else:
            row.start = computed
        if len(request.tokens) > len(lease.pages) * self._page_size:
            self.growing.append(row)
        self._reserve.renew(request)
        row.page_end = (computed // self._page_size + 1) * self._page_size
        row.fast_until = 0 if request.history.awaiting_first_token else min(request.length_limit, request.reserved_end) - 1

    def retry(self, request: Request) -> None:
        """Compute the last position of a request again, because its token was late. Its row in a launched plan is void."""
        lease_of(request).trim(len(request.tokens))  # frees a page of the void row; the next write to it is ordered after the void row's
        row = self._rows_by_request.get(request)
        if row is not None and row in self.growing:
            self.growing.remove(row)
        self.set_next(request)
        self.leave_fast_path((request,))

    def remove(self, request: Request) -> None:
        """Remove a request that ended, was preempted, or needs no more rows."""
        row = self._rows_by_request.pop(request, None)
        if row is not None:
            row.fast_until = 0  # a launched plan may still have the row
            del self.rows[bisect_left(self.rows, request.arrival, key=row_by_arrival)]
            if row in self.growing:
                self.growing.remove(row)

    # Planning

    def extend(self) -> list[Row]:
        """Take the pages that the next tokens need, and return all rows in a new list. The pages must be available."""
        if self.growing:
            self._cache.grow_each([row.pages for row in self.growing])
            self.growing.clear()
        return self.rows.copy()

    # Fast path

    def leave_fast_path(self, requests: Iterable[Request]) -> None:
        """Send the next rows of these requests through the slow path: the step has more for them than one token."""
        for request in requests:
            if request in self._rows_by_request:
                self._rows_by_request[request].fast_until = 0

    def advance(
        self,
        rows: Sequence[Row],
        tokens: Sequence[Sequence[int]],
        outputs: StepOutputs,
        advance_row: Callable[[Row, Sequence[int]], None],
        publish: Callable[[Request], None],
    ) -> None:
        """Add the sampled tokens to the requests of sampling rows.

        `advance_row`: the slow path. `publish`: called with a request that filled a block.
        """
        page_size, block = self._page_size, self._cache.block_tokens
        growing, append_request, append_token = self.growing, outputs.decoded.append, outputs.tokens.append
        for row, sampled in zip(rows, tokens, strict=True):
            request = row.request
            computed = row.start + 1
            if computed < row.fast_until and sampled and (token := sampled[0]) not in request.stop_tokens:
                row.start = request.computed = computed
                request.tokens.append(token)
                append_request(request)
                append_token(token)
                if computed == row.page_end:
                    row.page_end += page_size
                    growing.append(row)
                    if not computed % block:
                        publish(request)
            else:
                advance_row(row, sampled)
        self._reserve.consume(len(outputs.tokens))

    def advance_placeholder(self, rows: Sequence[Row], advance_row: Callable[[Row], None]) -> None:
        """Add a placeholder to the requests of a launched plan. `advance_row`: the slow path."""
        page_size, growing, fast_tokens = self._page_size, self.growing, 0
        for row in rows:
            computed = row.start + 1
            if computed < row.fast_until:
                request = row.request
                row.start = request.computed = computed
                request.tokens.append(PLACEHOLDER)
                fast_tokens += 1
                if computed == row.page_end:
                    row.page_end += page_size
                    growing.append(row)
            else:
                advance_row(row)
        self._reserve.consume(fast_tokens)

    def replace_placeholders(
        self,
        rows: Sequence[Row],
        result: StepResult,
        outputs: StepOutputs,
        advance_row: Callable[[Row, Sequence[int], tuple[TokenLogprobs, ...]], None],
        publish: Callable[[Request], None],
    ) -> None:
        """Add the sampled tokens to requests whose placeholders were removed. The positions were counted with the placeholders.

        `advance_row`: the slow path. `publish`: called with a request that filled a block.
        """
        block, append_request, append_token = self._cache.block_tokens, outputs.decoded.append, outputs.tokens.append
        for row, sampled, logprobs in zip(rows, result.tokens, result.logprobs or repeat(()), strict=False):
            request = row.request
            computed = request.computed
            if computed < row.fast_until and sampled and not logprobs and (token := sampled[0]) not in request.stop_tokens:
                request.tokens.append(token)
                append_request(request)
                append_token(token)
                if not computed % block:
                    publish(request)
            else:
                advance_row(row, sampled, logprobs)
        self._reserve.consume(len(outputs.tokens))
