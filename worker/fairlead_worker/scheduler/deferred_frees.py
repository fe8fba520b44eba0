"""Pages of requests that ended while a plan was in flight. Its rows may still write to them, so they become free when it ends."""

from fairlead_worker.scheduler.request import Request, lease_of


class DeferredFrees:
    """Counts started and finished plans, and defers page frees until the plans in flight end."""

    def __init__(self) -> None:
        self._started = self._finished = 0
        self._requests: list[tuple[int, Request]] = []
        """Each request with the number of the latest plan in flight when it ended."""

    def __len__(self) -> int:
        return len(self._requests)

    def start_plan(self) -> int:
        """Return the number of a plan that starts, from 1."""
        self._started += 1
        return self._started

    def finish_plan(self, number: int) -> None:
        """Free the pages that waited for this plan. All plans before it have run too."""
        self._finished = max(self._finished, number)
        if self._requests:
            for _, request in [each for each in self._requests if each[0] <= number]:
                release(request)
            self._requests = [each for each in self._requests if each[0] > number]

    def add(self, request: Request) -> None:
        """Free the pages of a request now if no plan is in flight, else with the latest plan."""
        if self._started > self._finished:
            self._requests.append((self._started, request))
        else:
            release(request)


def release(request: Request) -> None:
    """Free the pages of a request."""
    lease_of(request).release()
    request.lease = None
