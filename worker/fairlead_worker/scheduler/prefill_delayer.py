"""Delays prefill while more requests are expected, so that one step computes a whole wave of prompts.

Clients that send the next request after each answer arrive in waves. Streams that end in one step are followed, a few milliseconds apart,
by as many new prompts. A step that starts for the first prompt alone makes the others wait, and then their prefill stalls its decodes.
So admission waits while fewer requests have arrived than have just ended. It also waits while all running streams are about to reach their
length limit: otherwise a wave that was split in two would stay split, and each part would stall the decodes of the other. If some streams
run for longer, there is no delay: one more step is one more short stall.

The delay is a share of the expected prefill time (`prefill_delay_percent`), and at least one decode step. So the possible loss is bounded
by the work, and is tiny on a fast device. Decodes continue during the delay. If nothing runs and more requests are expected, the first
prompt that is long enough to fill a step starts and pauses before its last page, so the time is not lost. If nothing runs and no request
has ended, the delay is a short silence: a first wave arrives within the time it takes to read its requests. SGLang's prefill delayer waits
for other ranks in this way.
"""

import time
from collections import deque
from collections.abc import Callable
from math import inf

from fairlead_worker.scheduler.scheduler import Scheduler

FRESH_SECONDS = 0.1
"""A client that sends nothing for so long after an answer is not expected to."""
MOST_SECONDS = 0.1
"""Longest delay, for prompts of any length."""
MOST_WAITING = 64
"""Above this queue length there is no delay: the queue is a full wave."""
SILENCE = 0.5
"""Share of the delay that must pass without arrivals before an idle engine starts, if no more requests are expected. It must exceed the
time that the API takes for the next request of a wave: a fortieth of a prompt's prefill was too short with both processes on two cores."""


class PrefillDelayer:
    """Computes the admission delay from a scheduler's counters, between its steps."""

    __slots__ = ("_arrivals", "_away", "_clock", "_ended", "_ends", "_last_arrival", "_scheduler", "_share", "_since", "early_start_tokens")

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._share = scheduler.config.prefill_delay_percent / 100
        self._arrivals, self._ended = scheduler.arrivals, scheduler.ended
        self._ends: deque[tuple[float, int]] = deque()
        """(time in seconds, number) of recently ended requests."""
        self._away = 0
        """Recently ended requests that no new request has replaced."""
        self._last_arrival = 0.0
        self._since = 0.0
        """When the queue stopped being empty, in seconds; 0 while it is empty."""
        self.early_start_tokens = 0
        """Least tokens to compute for a waiting request that starts during the delay; 0: none starts."""

    def seconds(self) -> float:
        """Return the seconds until admissions may continue; 0: now."""
        scheduler, self.early_start_tokens = self._scheduler, 0
        ended, came = scheduler.ended - self._ended, scheduler.arrivals - self._arrivals
        waiting = len(scheduler.waiting) + (scheduler.held_chunk is not None)
        if not self._share or not (ended or came or waiting):
            self._since = 0.0
            return 0.0
        self._ended, self._arrivals = scheduler.ended, scheduler.arrivals
        now = self._clock()
        while self._ends and now - self._ends[0][0] > FRESH_SECONDS:
            self._away = max(self._away - self._ends.popleft()[1], 0)
        if ended:
            self._ends.append((now, ended))
            self._away += ended
        if came:
            self._away = max(self._away - came, 0)
            self._last_arrival = now
        self._since = (self._since or now) if waiting else 0.0
        # An older queue is no wave: its requests wait for pages or slots.
        if not 0 < waiting <= MOST_WAITING or now - self._since >= MOST_SECONDS or scheduler.waiting.has_urgent:
            return 0.0
        return max(self._until(waiting, now) - now, 0.0)

    def _until(self, waiting: int, now: float) -> float:
        scheduler, config, begun = self._scheduler, self._scheduler.config, self._scheduler.held_chunk
        uncached, rate = scheduler.waiting.count_uncached_tokens(), scheduler.stats.prefill_rate
        if begun is not None:
            uncached += len(begun.tokens) - begun.cached
        if not rate or scheduler.chunked_req is not begun or waiting >= (config.prefill_max_requests or MOST_WAITING):
            return now
        if 0 < scheduler.idle_prefill <= uncached:
            return now  # the step is full
        wait = self._share * uncached / rate
        if coming := self._away + len(scheduler.running) - (begun is not None):
            # Even a small step takes a decode step's time, and requests that arrive during it wait for its end.
            least = scheduler.stats.step_seconds
            self.early_start_tokens = max(int(least * rate), 1)
            wait = max(wait * (1 + coming / waiting), least)
            until = self._since + min(wait, MOST_SECONDS)
            return until if now + self._last_end() <= until else now
        if self._ends:
            return now
        return min(self._last_arrival + SILENCE * wait, self._since + wait, self._since + MOST_SECONDS)

    def _last_end(self) -> float:
        """Return the seconds until all streams reach their length limit, at the pace of recent decodes; inf before any decode."""
        streams = [request for request in self._scheduler.running if request is not self._scheduler.held_chunk]
        if not streams:
            return 0.0
        steps = max(request.length_limit - len(request.tokens) for request in streams)
        return steps * (self._scheduler.stats.step_seconds or inf)
