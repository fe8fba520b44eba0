"""Which workers may be chosen for a model, kept current one worker at a time: neither a change nor a request iterates over the fleet."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairlead_router.fleet.workers import Worker


class WorkerSet:
    """Workers in a list that changes in constant time: the last one takes the place of a removed one."""

    __slots__ = ("places", "workers")

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.places: dict[str, int] = {}
        """Places in `workers`, by address."""

    def set(self, worker: "Worker", is_member: bool) -> None:
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


class Eligibility:
    """Eligible workers of one model. `usable` and `last_resort` change in place: use them before anything is awaited."""

    __slots__ = ("_ineligible", "_ineligible_set", "_model", "last_resort", "usable")

    def __init__(self, model: str) -> None:
        self._model = model
        self.usable, self.last_resort = WorkerSet(), WorkerSet()
        self._ineligible: set[str] = set()
        self._ineligible_set: frozenset[str] | None = None

    @property
    def ineligible(self) -> frozenset[str]:
        """Addresses of all other workers than the usable ones."""
        if self._ineligible_set is None:
            self._ineligible_set = frozenset(self._ineligible)
        return self._ineligible_set

    def update(self, worker: "Worker") -> None:
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
