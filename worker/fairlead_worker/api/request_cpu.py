"""CPU time of a request that its tokens do not pay for. The head of an answer reports it to the router, and the tenant pays for it."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import thread_time
from typing import Any, Final

from fairlead_worker.api.errors import busy

HEADER: Final = b"x-fairlead-cpu-ms"
"""Whole milliseconds, rounded; absent for less than LEAST_SECONDS."""
LEAST_SECONDS: Final = 0.001
"""What the tokens of a request pay for: an ordinary one takes 0.3 ms."""
SECONDS_A_TOKEN: Final = 4e-6
"""What a token of the quota buys, as in the router's prices (`request/price.py`)."""
MASK_SECONDS_A_TOKEN: Final = 200e-6
"""Masks of a JSON schema take 50 µs a token: more than this is an expensive grammar."""
COUNTED_BYTES: Final = 1024
"""Size of a body from which its steps are counted: to count them takes 10 µs. A shorter one is read in less than LEAST_SECONDS."""
RECEIVED_SECONDS: Final = 3e-9
"""For each byte of a body that the server receives, beside the request's steps."""
MOST_UNREPORTED: Final = 2.0
"""Seconds from which a tenant's next request is refused before its body is read. The refusal reports them."""
MOST_TENANTS: Final = 1024


class UnreportedCpu:
    """CPU seconds that no answer has reported, by tenant: of requests without an answer, and of streams after their head."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[str, float] = OrderedDict()

    def add(self, tenant: str, seconds: float) -> None:
        """Add seconds, but not of clients without a router. Of too many tenants, the one that came first is forgotten."""
        if not tenant:
            return
        self._seconds[tenant] = self._seconds.get(tenant, 0.0) + seconds
        if len(self._seconds) > MOST_TENANTS:
            self._seconds.popitem(last=False)

    def take(self, tenant: str) -> float:
        """Return a tenant's seconds, and forget them."""
        return self._seconds.pop(tenant, 0.0)

    def check(self, tenant: str) -> None:
        """Raise ApiError 429 for a tenant with too many seconds: without an answer it would never pay for them."""
        if (seconds := self._seconds.get(tenant, 0.0)) > MOST_UNREPORTED:
            raise busy(f"your earlier requests have computed for {seconds:.1f} s that no answer has reported; try again", 1)


def excess(seconds: float, each: float, tokens: int) -> float:
    """Return the seconds beyond those that so many tokens pay for."""
    return max(0.0, seconds - each * tokens)


class RequestCpu:
    """The seconds of one request, until its answer begins or its client leaves; later ones go to the tenant's next answer."""

    def __init__(self, tenant: str, unreported: UnreportedCpu | None) -> None:
        """`unreported`: keeps the seconds of requests without an answer. None: the request is free."""
        self.tenant, self._unreported = tenant, unreported
        self._seconds = self._covered = 0.0
        self.tokens = 0
        """Tokens of the usage, set before the head of an answer with a usage: they pay for the covered seconds."""
        self._step_began: float | None = None
        self._has_ended = unreported is None

    def add(self, seconds: float) -> None:
        if not self._has_ended:
            self._seconds += seconds
        elif self._unreported is not None:
            self._unreported.add(self.tenant, seconds)

    def add_covered(self, seconds: float) -> None:
        """Add seconds of rendering, tokenizing or formatting, for which the tokens of the usage pay first."""
        if self._has_ended:
            self.add(excess(seconds, SECONDS_A_TOKEN, self.tokens))
        else:
            self._covered += seconds

    def add_computed(self, tokens: int) -> None:
        """Add tokens that the engine computed for a client that left before its answer began: without an answer there is no usage."""
        self.add(SECONDS_A_TOKEN * tokens)

    def add_masks(self, seconds: float, tokens: int) -> None:
        """Add seconds of filling the masks of an output of so many tokens."""
        self.add(excess(seconds, MASK_SECONDS_A_TOKEN, tokens))

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count a block without waits as covered, unless its step is counted anyway."""
        began = thread_time() if self._step_began is None else None
        try:
            yield
        finally:
            if began is not None:
                self.add_covered(thread_time() - began)

    def report(self) -> list[tuple[bytes, bytes]]:
        """Return the header for the head of the answer, which begins now."""
        if self._has_ended or self._unreported is None:
            return []
        if self._step_began is not None:
            self._seconds += thread_time() - self._step_began
        self._has_ended = True
        seconds = self._seconds + excess(self._covered, SECONDS_A_TOKEN, self.tokens) + self._unreported.take(self.tenant)
        return [(HEADER, b"%d" % round(1000 * seconds))] if seconds >= LEAST_SECONDS else []

    def close(self) -> None:
        """End the request. Without an answer, its seconds are kept for the tenant's next one."""
        if not self._has_ended:
            self._has_ended = True
            self.add(self._seconds + self._covered)

    def add_received(self, size: int) -> None:
        """Count the bytes of a body that the server has received."""
        self.add(RECEIVED_SECONDS * size)

    def count(self, work: Awaitable[None], headers: Mapping[bytes, bytes]) -> Awaitable[None]:
        """Return an awaitable that runs `work`, and counts its steps unless the head tells that the body is short. A gateway's is chunked.

        The steps of tasks that it starts are not counted: those of the answer's tokens.
        """
        is_short = b"transfer-encoding" not in headers and int(headers.get(b"content-length", b"0")) < COUNTED_BYTES
        return work if is_short else _Counted(self, work)

    def run_step(self, step: Callable[[], Any]) -> Any:
        if self._has_ended:
            return step()
        began = self._step_began = thread_time()
        try:
            return step()
        finally:
            self._step_began = None
            if not self._has_ended:
                self._seconds += thread_time() - began


class _Counted:
    """A coroutine whose steps, from one wait to the next, are counted: other tasks run in between."""

    def __init__(self, cpu: RequestCpu, work: Awaitable[None]) -> None:
        self._cpu, self._work = cpu, work.__await__()

    def __await__(self) -> Generator[Any, Any, None]:
        step: Callable[[], Any] = partial(self._work.send, None)
        while True:
            try:
                waits_for = self._cpu.run_step(step)
            except StopIteration:
                return
            try:
                yield waits_for
            except BaseException as error:
                step = partial(self._work.throw, error)
            else:
                step = partial(self._work.send, None)
