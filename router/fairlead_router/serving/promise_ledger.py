"""Promised starts: what makes the `Retry-After` of a rejected request come true. Pure: the caller gives the time.

The service is one fluid queue: `wait` seconds of work are ahead of a prompt, and `rate` prompt tokens are computed each second. A rejection
books the prompt at the first whole second at which its wait is short enough, given the work ahead and the bookings before it, and at which
no later booking becomes too late. A request without a booking is admitted only if it keeps every booking of its own or a higher urgency.

A booked request may never return. Its tokens therefore count less if its tenant's requests have rarely returned lately, and the longer it
is due, like the seats of an overbooked flight: else clients that do not retry would leave the workers idle.
"""

import math
from bisect import insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

MAX_BOOKINGS = 256
MAX_SECONDS = 600
"""Furthest promise. OpenAI's clients wait for ten minutes."""
GRACE_SECONDS, GRACE_SHARE = 1.0, 0.1
"""Time after the promise for which a booking is kept: at least a second, or a tenth of the promised wait."""
_RETURNS = 1 / 8
"""Weight of the newest outcome in the average of a tenant's returns."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs. `tokens`: uncached, of its prompt. `slack`: longest wait before it, in seconds. Lower `priority` goes first."""

    key: Hashable
    tenant: str
    priority: int
    tokens: float
    slack: float


@dataclass(frozen=True, slots=True)
class Booking:
    """A promise that the demand can start `at` a time. It is kept until `expires`."""

    demand: Demand
    at: float
    expires: float


class PromiseLedger:
    """The bookings, at most MAX_BOOKINGS. A tenant can add one while it has no more than there are free ones.

    So a tenant alone gets half of them, and several get equal parts (dynamic thresholds: Choudhury and Hahne, 1998).
    """

    def __init__(self) -> None:
        self._bookings: dict[Hashable, Booking] = {}
        self._in_order: list[Booking] = []
        self._per_tenant: dict[str, int] = {}
        self._returns: dict[str, float] = {}
        self.kept = self.broken = self.expired = 0
        """Promises by outcome: admitted on return, too late on return, and never claimed."""

    def __len__(self) -> int:
        return len(self._bookings)

    def fits(self, demand: Demand, wait: float, rate: float, now: float, own_wait: float | None = None) -> bool:
        """Return whether the demand can start now, within its slack and without delaying a booking beyond its own.

        `own_wait`: the demand's wait, if it is not that of the bookings.
        """
        return _Timeline(self._ahead_of(demand), self._returns, wait, rate, now).fits(demand, now, wait if own_wait is None else own_wait)

    def promise(self, demand: Demand, wait: float, rate: float, now: float, earliest: float = 0.0) -> int:
        """Book the demand, and return the seconds until its start, at least 1 and at least `earliest`.

        Without a free booking, or beyond MAX_SECONDS, nothing is booked: the seconds are the best guess.
        """
        timeline = _Timeline(self._ahead_of(demand), self._returns, wait, rate, now)
        seconds = timeline.first_whole_second(demand, earliest)
        if seconds > MAX_SECONDS or self._per_tenant.get(demand.tenant, 0) >= MAX_BOOKINGS - len(self):
            return min(seconds, MAX_SECONDS)
        at = now + seconds
        booking = Booking(demand, at, at + max(GRACE_SECONDS, GRACE_SHARE * seconds))
        self._bookings[demand.key] = booking
        insort(self._in_order, booking, key=_start)
        self._per_tenant[demand.tenant] = self._per_tenant.get(demand.tenant, 0) + 1
        return seconds

    def find(self, key: Hashable) -> Booking | None:
        """Return the booking of a request that may have returned."""
        return self._bookings.get(key)

    def close(self, booking: Booking, kept: bool) -> None:
        """Remove the booking of a request that returned. `kept`: it was admitted."""
        self._remove(booking)
        self.kept, self.broken = self.kept + kept, self.broken + (not kept)
        self._record(booking, 1.0)

    def expire(self, now: float) -> None:
        """Remove the bookings that were not claimed in time."""
        for booking in [each for each in self._due(now) if each.expires < now]:
            self._remove(booking)
            self.expired += 1
            self._record(booking, 0.0)

    def return_share(self, tenant: str) -> float:
        """Return the share of the tenant's booked tokens that counts, by how many of its requests returned lately."""
        return math.sqrt(self._returns.get(tenant, 1.0))

    def _due(self, now: float) -> Iterator[Booking]:
        for booking in self._in_order:
            if booking.at > now:
                return
            yield booking

    def _ahead_of(self, demand: Demand) -> list[Booking]:
        """Return the bookings that the demand must not delay, by start."""
        return [each for each in self._in_order if each.demand.priority <= demand.priority and each.demand.key != demand.key]

    def _record(self, booking: Booking, outcome: float) -> None:
        tenant = booking.demand.tenant
        before = self._returns.get(tenant, 1.0)
        self._returns[tenant] = before + (outcome - before) * _RETURNS

    def _remove(self, booking: Booking) -> None:
        del self._bookings[booking.demand.key]
        self._in_order.remove(booking)
        tenant = booking.demand.tenant
        self._per_tenant[tenant] -= 1
        if not self._per_tenant[tenant]:
            del self._per_tenant[tenant]


class _Timeline:
    """Projected work: at the start of gap k, `_after[k]` seconds of it are ahead. A booking separates two gaps."""

    def __init__(self, bookings: list[Booking], returns: dict[str, float], wait: float, rate: float, now: float) -> None:
        self._rate, self._now = rate, now
        self._starts, self._after, before = [now], [wait], []
        for booking in bookings:
            start = max(now, booking.at)
            before.append(max(0.0, self._after[-1] - (start - self._starts[-1])))
            # Simulated at 3 times capacity, half of the requests returning: the root keeps 97 % of the promises, the share itself 77 %.
            share = math.sqrt(returns.get(booking.demand.tenant, 1.0)) * (booking.expires - start) / (booking.expires - booking.at)
            self._starts.append(start)
            self._after.append(before[-1] + max(0.0, share) * booking.demand.tokens / rate)
        self._room = [math.inf] * (len(bookings) + 1)
        """Seconds of work that the end of each gap can still take, so that no later booking is too late."""
        for index in range(len(bookings) - 1, -1, -1):
            later = self._idle(index + 1, self._starts[index + 1]) + self._room[index + 1]
            self._room[index] = min(bookings[index].demand.slack - before[index], later)

    def first_whole_second(self, demand: Demand, earliest: float) -> int:
        """Return the first whole second from now, at least 1 and at least `earliest`, at which the demand can start.

        It is at most MAX_SECONDS + 1: a backlog can be infinite, because rates are whatever a worker reports.
        """
        seconds = max(1, math.ceil(min(earliest, MAX_SECONDS + 1)))
        for index, (begin, end) in enumerate(pairwise((*self._starts, math.inf))):
            at = begin + max(0.0, self._after[index] - demand.slack)
            seconds = max(seconds, math.ceil(min(at - self._now - 1e-9, MAX_SECONDS + 1)))
            if self._now + seconds < end and self._takes(index, self._now + seconds, demand):
                break
        return seconds

    def fits(self, demand: Demand, now: float, own_wait: float) -> bool:
        index = next((index for index, start in enumerate(self._starts[1:]) if start > now), len(self._starts) - 1)
        due = self._after[index] - self._after[0]
        return own_wait + due <= demand.slack + 1e-9 and self._has_room(index, now, demand)

    def _takes(self, index: int, at: float, demand: Demand) -> bool:
        wait = max(0.0, self._after[index] - (at - self._starts[index]))
        return wait <= demand.slack + 1e-9 and self._has_room(index, at, demand)

    def _has_room(self, index: int, at: float, demand: Demand) -> bool:
        return demand.tokens / self._rate <= self._idle(index, at) + self._room[index]

    def _idle(self, index: int, at: float) -> float:
        """Return the idle seconds from `at` to the end of the gap."""
        if index + 1 == len(self._starts):
            return math.inf
        wait = max(0.0, self._after[index] - (at - self._starts[index]))
        return max(0.0, self._starts[index + 1] - at - wait)


_start = attrgetter("at")
