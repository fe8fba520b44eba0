"""A request's prompt at a worker, from the attempt until the prompt is computed."""

import asyncio
from collections.abc import Callable
from time import monotonic

from fairlead_router.fleet.workers import Worker

RECHECK_SECONDS = 0.25
"""Seconds until a prompt is checked again that may not be computed yet."""


class PendingPrompt:
    """Counts the prompt at the worker from now on. Call `end` when the answer begins and when the attempt fails. Needs an event loop.

    A stream begins when its prompt is computed. A whole answer begins at its end, and there is no earlier sign that its prompt is computed.
    So that prompt counts until the worker would have computed all prompts of this router at its measured rate, and reports fewer waiting
    requests than this router has prompts there. If the worker is slower, its own reports show the rest as its backlog. Without a measured
    rate it counts until a later report.
    """

    def __init__(self, worker: Worker, tokens: int, streams: bool, on_computed: Callable[[], None]) -> None:
        """`tokens`: to compute. `on_computed` is called once, at the end or when the prompt counts as computed."""
        self._worker, self._tokens, self._on_computed = worker, tokens, on_computed
        self._is_pending = True
        self._began = monotonic()
        worker.begin_prompt(tokens, self._began)
        seconds = worker.prefill_until - self._began
        self._timer = None if streams else asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        worker = self._worker
        known = worker.load.prefill_rate > 0 or worker.load_at > self._began
        if known and worker.pending_prompts > worker.load.waiting:
            self.end()
        else:
            self._timer = asyncio.get_running_loop().call_later(RECHECK_SECONDS, self._expire)

    def end(self) -> None:
        """Stop counting the prompt. Idempotent."""
        if not self._is_pending:
            return
        self._is_pending = False
        if self._timer is not None:
            self._timer.cancel()
        self._worker.end_prompt(self._tokens)
        self._on_computed()
