"""Requests that ended while a plan was out: its rows may still write into their pages, which come back with it."""

from fairlead_worker.scheduler.request import Request, lease_of


class DeferredFrees:
    """Counts the plans that go out and come back, and holds back the pages of those that left meanwhile."""

    __slots__ = ("_finished", "_requests", "_started")

    def __init__(self) -> None:
        self._started = self._finished = 0
        self._requests: list[tuple[int, Request]] = []
        """With the number of the last plan that was out then."""

    def __len__(self) -> int:
        return len(self._requests)

    def start_plan(self) -> int:
        """Another plan is out: its number, from 1."""
        self._started += 1
        return self._started

    def finish_plan(self, number: int) -> None:
        """That plan was run, and so were all before it."""
        self._finished = max(self._finished, number)
        if self._requests:
            for _, request in [each for each in self._requests if each[0] <= number]:
                release(request)
            self._requests = [each for each in self._requests if each[0] > number]

    def add(self, request: Request) -> None:
        """It runs no more: its pages are given back now if no plan is out, else with the latest one."""
        if self._started > self._finished:
            self._requests.append((self._started, request))
        else:
            release(request)


def release(request: Request) -> None:
    """Out of its pages."""
    lease_of(request).release()
    request.lease = None
