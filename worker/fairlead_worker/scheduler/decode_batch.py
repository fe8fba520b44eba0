"""The decoding requests: their rows, the pages that they need next, and the fast path of a decode that only adds a token."""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import repeat

from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.ipc.messages import TokenLogprobs
from fairlead_worker.scheduler.budget import OutputReserve
from fairlead_worker.scheduler.plan import Row, StepResult
from fairlead_worker.scheduler.request import Request, by_arrival, lease_of
from fairlead_worker.scheduler.step_outputs import StepOutputs


class DecodeBatch:
    """Owns the decoding requests: each has one token to compute.

    A decode that only adds a token takes the fast path, first for its position and then for its token: C functions alone until a page
    fills. With overlap the next step is planned between the two.
    """

    def __init__(self, cache: PrefixCache, reserve: OutputReserve) -> None:
        self.requests: list[Request] = []
        """By arrival."""
        self.growing: dict[Request, None] = {}
        """Those whose token needs a page."""
        self._members: set[Request] = set()
        self._cache = cache
        self._reserve = reserve
        self._page_size = cache.page_size

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    # Membership

    def set_next(self, request: Request) -> None:
        """Note that a request has one token to compute, and until when its fast path is valid."""
        lease, computed = lease_of(request), request.computed
        if request not in self._members:
            self._members.add(request)
            insort(self.requests, request, key=by_arrival)
        self.growing.pop(request, None)
        if request.length > len(lease.pages) * self._page_size:
            self.growing[request] = None
        self._reserve.renew(request)
        request.page_end = (computed // self._page_size + 1) * self._page_size
        request.fast_until = 0 if request.history.awaiting_first_token else min(request.length_limit, request.reserved_end) - 1

    def retry(self, request: Request) -> None:
        """Compute the last position of a request again, because its token was late. Its row in a launched plan is void."""
        lease_of(request).trim(request.length)  # frees a page of the void row; the next write to it is ordered after the void row's
        self.set_next(request)
        request.fast_until = 0

    def remove(self, request: Request) -> None:
        """Remove a request that ended, was preempted, or needs no more rows."""
        if request in self._members:
            self._members.discard(request)
            request.fast_until = 0  # a launched plan may still have a row of it
            del self.requests[bisect_left(self.requests, request.arrival, key=by_arrival)]
            self.growing.pop(request, None)

    # Planning

    def extend(self) -> list[Row]:
        """Take the pages that the next tokens need, and return a row of each request. The pages must be available."""
        if self.growing:
            self._cache.grow_each([lease_of(request) for request in self.growing])
            self.growing.clear()
        return [Row(request, request.computed, 1, request.lease.pages, True) for request in self.requests]  # type: ignore[union-attr]  # they run

    # Fast path

    def advance_unread(self, rows: Sequence[Row], advance_row: Callable[[Row], None] = lambda row: None) -> None:
        """Count the token that the rows of a plan sample, before it is known. `advance_row`: the slow path."""
        page_size, growing, fast_tokens = self._page_size, self.growing, 0
        for row in rows:
            request, computed = row.request, row.start + 1
            if computed < request.fast_until:
                request.computed = computed
                request.unread = 1
                fast_tokens += 1
                if computed == request.page_end:
                    request.page_end += page_size
                    growing[request] = None
            else:
                advance_row(row)
        self._reserve.consume(fast_tokens)

    def read_tokens(
        self,
        rows: Sequence[Row],
        result: StepResult,
        outputs: StepOutputs,
        advance_row: Callable[[Row, Sequence[int], tuple[TokenLogprobs, ...]], None],
        publish: Callable[[Request], None],
    ) -> None:
        """Add the sampled tokens of rows that `advance_unread` has counted.

        `advance_row`: the slow path. `publish`: called with a request that filled a block.
        """
        block, append_request, append_token = self._cache.block_tokens, outputs.decoded.append, outputs.tokens.append
        for row, sampled, logprobs in zip(rows, result.tokens, result.logprobs or repeat(()), strict=False):
            request = row.request
            if request.unread and sampled and not logprobs and (token := sampled[0]) not in request.stop_tokens:
                computed = request.computed
                if computed < request.fast_until:
                    request.unread = 0
                    request.tokens.append(token)
                    append_request(request)
                    append_token(token)
                    if not computed % block:
                        publish(request)
                    continue
            advance_row(row, sampled, logprobs)

    def forget_unread(self, request: Request) -> None:
        """Uncount an unread token. The slow path adds those that the step has."""
        if request.unread:
            request.unread = 0
            self._reserve.consume(-1)
