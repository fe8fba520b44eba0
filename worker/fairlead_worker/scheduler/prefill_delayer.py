"""How long waiting requests wait for others that are about to come, so that a wave of them is computed in one step.

Clients that send their next request when the last one is answered come in waves: streams that end in one step are followed, a few
milliseconds apart, by as many new prompts. A step begun for the first of them keeps the others waiting until it is over, then they hold up
the first one's decodes, and that one is ahead of them from there on. So what waits is not admitted yet while fewer have come than have
just ended, or while the streams that still run are about to end for length: a wave that a step has cut in two would else stay so for ever,
each part holding up the decodes of the other. Where some streams go on for longer nobody waits: one step more is one short stall more.

The wait is a share of the time that all of them will take (`prefill_delay_percent`), and at least a decode step: what may be lost is
bounded by what there is to do, and next to nothing on a fast device. Decodes go on meanwhile. Where nothing runs and others are expected,
the first prompt that is long enough to fill a step begins, all but its last page, and waits with that: the time is not lost. Where nothing
runs and nobody has ended, a moment's silence is waited for: a first wave comes within what it takes to read its requests. SGLang's prefill
delayer waits for other ranks in this way.
"""

import time
from collections import deque
from collections.abc import Callable
from math import inf

from fairlead_worker.scheduler.scheduler import Scheduler

FRESH_SECONDS = 0.1
"""Whoever has not come again so long after an end is not about to."""
MOST_SECONDS = 0.1
"""Longest wait, whatever the prompts take."""
MOST_WAITING = 64
"""Requests that are a wave by themselves."""
SILENCE = 0.5
"""Of the share: how long nobody must have come for an engine that runs nothing to begin, with no reason to expect anybody. Longer than the
API takes for the next request of a wave: a fortieth of a prompt's prefill was not, where both processes share two cores."""


class PrefillDelayer:
    """Looks at a scheduler's counters between its steps."""

    __slots__ = ("_arrivals", "_away", "_clock", "_ended", "_ends", "_last_arrival", "_scheduler", "_share", "_since", "early_start_tokens")

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._share = scheduler.config.prefill_delay_percent / 100
        self._arrivals, self._ended = scheduler.arrivals, scheduler.ended
        self._ends: deque[tuple[float, int]] = deque()
        """When requests ended lately, and how many."""
        self._away = 0
        """Of these, those that nobody has come in place of."""
        self._last_arrival = 0.0
        self._since = 0.0
        """When the queue was empty last; 0 while it is."""
        self.early_start_tokens = 0
        """Tokens that one of those that wait must have to compute to begin already; 0: nobody does."""

    def seconds(self) -> float:
        """How long to admit nobody yet; 0: whoever waits may go."""
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
        # A queue that has been there for longer is no wave: its requests wait for room.
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
            # However little there is to do, a step takes what a step takes, and who comes during it waits for its end.
            least = scheduler.stats.step_seconds
            self.early_start_tokens = max(int(least * rate), 1)
            wait = max(wait * (1 + coming / waiting), least)
            until = self._since + min(wait, MOST_SECONDS)
            return until if now + self._last_end() <= until else now
        if self._ends:
            return now
        return min(self._last_arrival + SILENCE * wait, self._since + wait, self._since + MOST_SECONDS)

    def _last_end(self) -> float:
        """Seconds until all streams have ended for length, at the pace of recent decodes; before the first ones no end is in sight."""
        streams = [request for request in self._scheduler.running if request is not self._scheduler.held_chunk]
        if not streams:
            return 0.0
        steps = max(request.length_limit - len(request.tokens) for request in streams)
        return steps * (self._scheduler.stats.step_seconds or inf)
