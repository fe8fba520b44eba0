"""Which workers may be chosen for a model, kept current one worker at a time: neither a change nor a request iterates over the fleet."""

from typing import Generic, Protocol, TypeVar


class _Worker(Protocol):
    """What eligibility depends on. The table's workers have it."""

    address: str

    @property
    def usable(self) -> bool: ...

    @property
    def is_last_resort(self) -> bool: ...

    def serves(self, model: str) -> bool: ...


_W = TypeVar("_W", bound=_Worker)


class WorkerSet(Generic[_W]):
    """Workers in a list that changes in constant time: the last one takes the place of a removed one."""

    __slots__ = ("places", "workers")

    def __init__(self) -> None:
        self.workers: list[_W] = []
        self.places: dict[str, int] = {}
        """Places in `workers`, by address."""

    def set(self, worker: _W, is_member: bool) -> None:
        """Add or remove a worker."""
        if not is_member:
            self.discard(worker.address)
        elif worker.address not in self.places:
            self.places[worker.address] = len(self.workers)
            self.workers.append(worker)

    def discard(self, address: str) -> None:
        place = self.places.pop(address, None)
        if place is None:
            return
        last = self.workers.pop()
        if last.address != address:
            self.workers[place] = last
            self.places[last.address] = place


class Eligibility(Generic[_W]):
    """Eligible workers of one model. `usable` and `last_resort` change in place: use them before anything is awaited."""

    __slots__ = ("_ineligible", "_ineligible_set", "_model", "last_resort", "usable")

    def __init__(self, model: str) -> None:
        self._model = model
        self.usable, self.last_resort = WorkerSet[_W](), WorkerSet[_W]()
        self._ineligible: set[str] = set()
        self._ineligible_set: frozenset[str] | None = None

    @property
    def ineligible(self) -> frozenset[str]:
        """Addresses of all other workers than the usable ones."""
        if self._ineligible_set is None:
            self._ineligible_set = frozenset(self._ineligible)
        return self._ineligible_set

    def update(self, worker: _W) -> None:
        """Apply a worker's state."""
        serves = worker.serves(self._model)
        is_usable = serves and worker.usable
        self.usable.set(worker, is_usable)
        self.last_resort.set(worker, serves and worker.is_last_resort)
        (self._ineligible.discard if is_usable else self._ineligible.add)(worker.address)
        self._ineligible_set = None

    def discard(self, address: str) -> None:
        """Forget a worker."""
        self.usable.discard(address)
        self.last_resort.discard(address)
        self._ineligible.discard(address)
        self._ineligible_set = None
