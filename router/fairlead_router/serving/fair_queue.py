"""Fair queue: by priority, then the tenant that was served least, then the least work, with a bound on how long a request is passed.

Each tenant has a virtual counter of served tokens, divided by its weight. A tenant that returns after an idle time starts level with the
least served tenant in the queue, so idle time gives no credit (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).

A tenant's requests of one priority have the order of the least work: a request of `work` uncached tokens behind `n` requests with `ahead`
uncached tokens gets the number `clock + min(n * work, ahead)`, where the clock counts the tokens that left. So it is passed only by
requests that arrive before its turn by arrival. Under overload most requests wait here, and not in the engines.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from fairlead_router.tenancy.quota import Account


class QueuedRequest(msgspec.Struct, eq=False):
    """A request in the queue. Lower `priority` goes first."""

    account: Account
    priority: int
    tokens: int
    """Of its prompt."""
    size: int
    """Bytes of its body."""
    work: int = 0
    """Tokens of its prompt that no worker holds, as far as this router knew when it arrived at the queue."""
    number: int = 0
    """Order of arrival."""
    had_turn: bool = False
    """It was admitted once, and no worker could take it."""


Item = TypeVar("Item", bound=QueuedRequest)


@dataclass(slots=True)
class _Sum:
    count: int = 0
    size: int = 0
    tokens: int = 0

    def add(self, item: QueuedRequest, sign: int = 1) -> None:
        self.count += sign
        self.size += sign * item.size
        self.tokens += sign * item.tokens


Place = tuple[float, int]
"""Number by work, and the order of arrival among equals."""


@dataclass(slots=True)
class _Line(Generic[Item]):
    """The requests of one tenant and priority. It exists while there are any."""

    items: list[tuple[Place, Item]] = field(default_factory=list)
    work: int = 0
    clock: int = 0
    """Uncached tokens that left this line."""

    def place(self, item: QueuedRequest) -> Place:
        """Return the place that the request would get now. After its turn it goes before all others."""
        delay = min(len(self.items) * item.work, self.work)
        return (-1.0 if item.had_turn else float(self.clock + delay), item.number)

    def add(self, item: Item) -> None:
        insort(self.items, (self.place(item), item), key=_place)
        self.work += item.work

    def remove(self, item: Item) -> bool:
        """Remove the request. Return whether it was there."""
        index = next((index for index, (_, each) in enumerate(self.items) if each is item), None)
        if index is None:
            return False
        del self.items[index]
        self.work -= item.work
        self.clock += item.work
        return True


class FairQueue(Generic[Item]):
    """Queue with `push` and `pop`. `total` sums all entries. Costs grow with the number of waiting tenants, and little with requests."""

    def __init__(self) -> None:
        self._queues: dict[int, dict[Account, _Line[Item]]] = {}
        """By priority and tenant."""
        self._by_account: Counter[Account] = Counter()
        """Requests of each tenant that has any."""
        self.total = _Sum()

    def __len__(self) -> int:
        return self.total.count

    def __iter__(self) -> Iterator[Item]:
        """Iterate over all entries. The queue must not change meanwhile."""
        return (item for lines in self._queues.values() for line in lines.values() for _, item in line.items)

    def push(self, item: Item) -> None:
        """Insert by work. A requeued request goes before those that have not had their turn."""
        account = item.account
        if account not in self._by_account and self._by_account:
            account.served_tokens = max(account.served_tokens, min(other.served_tokens for other in self._by_account))
        self._queues.setdefault(item.priority, {}).setdefault(account, _Line()).add(item)
        self._by_account[account] += 1
        self.total.add(item)

    def pop(self, may: Callable[[Item], bool] = lambda item: True) -> Item | None:
        """Remove and return `peek`."""
        item = self.peek(may)
        if item is not None:
            self.discard(item)
        return item

    def peek(self, may: Callable[[Item], bool] = lambda item: True) -> Item | None:
        """Return the next request for which `may` is true; None if there is none."""
        for priority in sorted(self._queues):
            heads = {account: next((item for _, item in line.items if may(item)), None) for account, line in self._queues[priority].items()}
            first = {account: item for account, item in heads.items() if item is not None}
            if first:
                return first[min(first, key=lambda account: (account.served_tokens, first[account].number))]
        return None

    def discard(self, item: Item) -> None:
        """Remove the request if it is in the queue."""
        lines = self._queues.get(item.priority, {})
        line = lines.get(item.account)
        if line is None or not line.remove(item):
            return
        if not line.items:
            del lines[item.account]
        if not lines:
            del self._queues[item.priority]
        self.total.add(item, -1)
        self._by_account[item.account] -= 1
        if not self._by_account[item.account]:
            del self._by_account[item.account]

    def find_victim(self, newcomer: QueuedRequest) -> Item | None:
        """Return the request to displace from a full queue: the last and least urgent one of the tenant with the most requests.

        Return None if the newcomer's tenant would then have as many, or if the newcomer is less urgent. No tenant can thus fill the queue
        against the others.
        """
        own = self._by_account[newcomer.account] + 1
        item = self.find_last()
        if item is None or item.account is newcomer.account or self._by_account[item.account] <= own:
            return None
        return item if item.priority >= newcomer.priority else None

    def find_last(self) -> Item | None:
        """Return the last and least urgent request of the tenant with the most requests; None if the queue is empty."""
        if not self._by_account:
            return None
        account = max(self._by_account, key=self._by_account.__getitem__)
        priority = max(priority for priority, lines in self._queues.items() if account in lines)
        return self._queues[priority][account].items[-1][1]

    def work_ahead(self, newcomer: QueuedRequest) -> int:
        """Return the uncached prompt tokens expected to go before the newcomer.

        These are all more urgent ones, the equally urgent ones of its own tenant with an earlier place, and of each other tenant with such
        requests at most as many as the newcomer's tenant then has.
        """
        urgent = sum(line.work for priority, lines in self._queues.items() if priority < newcomer.priority for line in lines.values())
        equals = self._queues.get(newcomer.priority, {})
        own, line = 0, equals.get(newcomer.account)
        if line is not None:
            own = sum(item.work for _, item in line.items[: bisect_left(line.items, line.place(newcomer), key=_place)])
        share = own + newcomer.work
        return urgent + own + sum(min(share, line.work) for account, line in equals.items() if account is not newcomer.account)


def _place(entry: tuple[Place, object]) -> Place:
    return entry[0]
