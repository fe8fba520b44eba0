"""Who goes next: by priority, then the tenant that was served least, then the order of arrival.

Tokens served, by weight, are a virtual counter for each tenant; one that comes back after a rest starts level with the least served of
those that wait, so that rest is not saved up (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
"""

from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, Protocol, TypeVar


class QueueAccount(Protocol):
    """A tenant's account, as far as the queue is concerned."""

    served_tokens: float


class QueuedRequest(Protocol):
    """One request. `number`: its arrival; `size`: bytes kept for it; `tokens`: of its prompt; lower `priority` goes first."""

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
    """`push` and `pop`; `total` of all that wait. Costs grow with the tenants that wait, and little with the requests."""

    def __init__(self) -> None:
        self._queues: dict[int, dict[QueueAccount, list[Item]]] = {}
        """By priority and tenant, each in the order of arrival."""
        self._by_account: dict[QueueAccount, _Sum] = {}
        self.total = _Sum()

    def __len__(self) -> int:
        return self.total.count

    def __iter__(self) -> Iterator[Item]:
        """Not to be changed meanwhile."""
        return (item for lines in self._queues.values() for line in lines.values() for item in line)

    def push(self, item: Item) -> None:
        """To its place by arrival: one that had its turn and comes back is before those that came after it."""
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
        """The next that `may`, out of the queue; None when nobody waits who may."""
        for priority in sorted(self._queues):
            heads = {account: next(filter(may, line), None) for account, line in self._queues[priority].items()}
            first = {account: item for account, item in heads.items() if item is not None}
            if first:
                item = first[min(first, key=lambda account: (account.served_tokens, first[account].number))]
                self.discard(item)
                return item
        return None

    def discard(self, item: Item) -> None:
        """Out of the queue, if it is in it."""
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
        """Who should go where there is no room: the newest and least urgent request of the tenant with the most, unless the newcomer's own
        tenant would then have as many, or it is less urgent. So nobody can fill the queue against the others."""
        own = self._by_account.get(newcomer.account, _Sum()).count + 1
        account = max(self._by_account, key=lambda account: self._by_account[account].count, default=None)
        if account is None or account is newcomer.account or self._by_account[account].count <= own:
            return None
        priority = max(priority for priority, lines in self._queues.items() if account in lines)
        return self._queues[priority][account][-1] if priority >= newcomer.priority else None

    def tokens_ahead(self, newcomer: QueuedRequest) -> int:
        """Tokens that will probably go before a newcomer: all that are as urgent, or its own tenant's and as many of each of the others."""
        urgent = [lines for priority, lines in self._queues.items() if priority <= newcomer.priority]
        own = newcomer.tokens + self._by_account.get(newcomer.account, _Sum()).tokens
        sums = {account: self._by_account[account].tokens for lines in urgent for account in lines if account is not newcomer.account}
        return own - newcomer.tokens + sum(min(own, tokens) for tokens in sums.values())


_number = attrgetter("number")
