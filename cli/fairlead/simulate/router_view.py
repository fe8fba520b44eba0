"""What one of our routers knows of the workers: loads of its last poll, and its own requests in flight."""

import math
import random

from fairlead.simulate.fleet import Fleet, InflightRequests
from fairlead_router.fleet.workers import Worker

POLL_SECONDS = 1.0  # --poll-interval of the router


class RouterView:
    """The router's `Worker` for each pod."""

    def __init__(self, fleet: Fleet, inflight: InflightRequests, draw: random.Random) -> None:
        self._fleet, self._inflight = fleet, inflight
        self.workers = [Worker(f"10.0.{number >> 8}.{number & 255}:8000", lambda: 0.0) for number in range(len(fleet.pods))]
        self._phase = draw.random() * POLL_SECONDS

    def usable(self, now: float) -> list[Worker]:
        """Return the workers that may be chosen, up to date."""
        polled_at = max(0.0, (now - self._phase) // POLL_SECONDS * POLL_SECONDS + self._phase)
        inflight, chosen = self._inflight, []
        for number in self._fleet.usable:
            worker, pod = self.workers[number], self._fleet.pods[number]
            if worker.load_at != polled_at:
                worker.load, worker.load_at = pod.load_at(polled_at), polled_at
            worker.in_flight = inflight.count[number]
            worker.pending_tokens = int(inflight.pending[number])
            worker.prefill_until = math.inf  # so `prefill_seconds` counts all pending tokens
            worker.pending_prompts = len(inflight.waiting[number])
            worker.max_running = pod.model.max_running
            worker.runs_shortest_first = True  # `queues.ORDER`
            chosen.append(worker)
        return chosen
