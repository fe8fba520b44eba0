"""Fair queue: by priority, then the tenant that was served least, then the order of arrival.

Each tenant has a virtual counter of served tokens, divided by its weight. A tenant that returns after an idle time starts level with the
least served tenant in the queue, so idle time gives no credit (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
"""

from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, Protocol, TypeVar


class QueueAccount(Protocol):
    """Part of a tenant's account that the queue uses."""

    served_tokens: float


class QueuedRequest(Protocol):
    """Queued request. `number`: order of arrival. `size`: bytes of its body. `tokens`: of its prompt. Lower `priority` goes first."""

    @property
    def account(self) -> QueueAccount: ...
    @property
    def priority(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def tokens(self) -> int: ...


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


class FairQueue(Generic[Item]):
    """Queue with `push` and `pop`. `total` sums all entries. Costs grow with the number of waiting tenants, and little with requests."""

    def __init__(self) -> None:
        self._queues: dict[int, dict[QueueAccount, list[Item]]] = {}
        """Requests in the order of arrival, by priority and tenant."""
        self._by_account: dict[QueueAccount, _Sum] = {}
        self.total = _Sum()

    def __len__(self) -> int:
        return self.total.count

    def __iter__(self) -> Iterator[Item]:
        """Iterate over all entries. The queue must not change meanwhile."""
        return (item for lines in self._queues.values() for line in lines.values() for item in line)

    def push(self, item: Item) -> None:
        """Insert by order of arrival: a requeued request goes before those that arrived after it."""
        account = item.account
        if account not in self._by_account:
            if self._by_account:
                account.served_tokens = max(account.served_tokens, min(other.served_tokens for other in self._by_account))
            self._by_account[account] = _Sum()
        line = self._queues.setdefault(item.priority, {}).setdefault(account, [])
        line.insert(bisect(line, item.number, key=_number), item)
        self._by_account[account].add(item)
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
            heads = {account: next(filter(may, line), None) for account, line in self._queues[priority].items()}
            first = {account: item for account, item in heads.items() if item is not None}
            if first:
                return first[min(first, key=lambda account: (account.served_tokens, first[account].number))]
        return None

    def discard(self, item: Item) -> None:
        """Remove the request if it is in the queue."""
        lines = self._queues.get(item.priority, {})
        line = lines.get(item.account, [])
        if item not in line:
            return
        line.remove(item)
        if not line:
            del lines[item.account]
        if not lines:
            del self._queues[item.priority]
        self.total.add(item, -1)
        each = self._by_account[item.account]
        each.add(item, -1)
        if not each.count:
            del self._by_account[item.account]

    def find_victim(self, newcomer: QueuedRequest) -> Item | None:
        """Return the request to displace from a full queue: the newest and least urgent one of the tenant with the most requests.

        Return None if the newcomer's tenant would then have as many, or if the newcomer is less urgent. No tenant can thus fill the queue
        against the others.
        """
        own = self._by_account.get(newcomer.account, _Sum()).count + 1
        item = self.find_last()
        if item is None or item.account is newcomer.account or self._by_account[item.account].count <= own:
            return None
        return item if item.priority >= newcomer.priority else None

    def find_last(self) -> Item | None:
        """Return the newest and least urgent request of the tenant with the most requests; None if the queue is empty."""
        if not self._by_account:
            return None
        account = max(self._by_account, key=lambda account: self._by_account[account].count)
        priority = max(priority for priority, lines in self._queues.items() if account in lines)
        return self._queues[priority][account][-1]

    def tokens_ahead(self, newcomer: QueuedRequest) -> int:
        """Return the prompt tokens expected to go before the newcomer.

        These are its own tenant's, and of each other tenant with equally urgent requests at most as many as the newcomer's tenant then has.
        """
        urgent = [lines for priority, lines in self._queues.items() if priority <= newcomer.priority]
        own = newcomer.tokens + self._by_account.get(newcomer.account, _Sum()).tokens
        sums = {account: self._by_account[account].tokens for lines in urgent for account in lines if account is not newcomer.account}
        return own - newcomer.tokens + sum(min(own, tokens) for tokens in sums.values())


_number = attrgetter("number")
