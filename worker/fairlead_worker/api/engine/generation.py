"""The sequences of one API request: how they enter the engine, and their outputs as they arrive."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from msgspec.structs import replace

from fairlead_worker.api.engine.client import EngineClient, EngineGone
from fairlead_worker.ipc.messages import Output, Submit

MAX_UNREAD_BYTES = 64 << 20
"""Approximate bytes of outputs that may wait for one slow client."""
MAX_WAITING_TOKENS = 16_384
"""Prompt tokens of one API request that wait in the engine at a time. It takes prompts in their order of arrival, so a list of a thousand
prompts would delay everybody's next request by all of them."""
LEAST_WAITING_TOKENS = 256
"""A shorter prompt counts as this many, because its step and its messages cost more than its tokens: of a list of one-token prompts 64 wait
at a time. It halves the p99 of others beside such lists (`bench router/hostile_clients`), and a list alone takes 4 to 6 %
more time with SmolLM2 on a CPU."""


class ClientTooSlow(Exception):
    """Too many outputs wait for a client that does not read."""


class Generation:
    """Outputs of one API request's sequences as they arrive. Leaving the context aborts unfinished ones.

    A sequence is sent when the earlier ones that have no output yet count less than MAX_WAITING_TOKENS tokens.
    """

    def __init__(
        self, client: EngineClient, submits: Sequence[Submit], traced: int = 0, report: Callable[[int, Output], None] | None = None
    ) -> None:
        """`submits`: without ids. `traced`: number of them, the first ones, whose prefill chunks the engine reports.

        `report` gets the number and the last output of each sequence that leaving the context, or a slow client, aborts. It may have ended
        by itself meanwhile.
        """
        self._client, self._report = client, report
        self._traced = traced
        self._arrived: list[tuple[int, Output] | EngineGone] = []
        self._unread_bytes = 0
        """Approximate bytes of `_arrived`."""
        self._waiter: asyncio.Future[None] | None = None
        """Set while `outputs` waits for the first output. A list and a future: a queue's locks and waiters cost more at every token."""
        self._ids: list[str] = []
        self._open = set(range(len(submits)))
        self._submits = submits
        self._sent = 0
        """Sequences that the engine has got, the first ones."""
        self._waiting: dict[int, int] = {}
        """What each sequence that was sent and has no output counts. Choices of one prompt count once."""
        self._waiting_tokens = 0

    async def __aenter__(self) -> "Generation":
        self._ids = self._client.add_request(len(self._submits), self._submits[0].tenant if self._submits else "")
        self._count_unsent(self._submits, 1)
        self._send()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for item in self._arrived:
            if self._report is not None and not isinstance(item, EngineGone) and item[1].finish is not None and item[0] in self._open:
                self._report(*item)  # `outputs` has not read it
        for index in tuple(self._open):
            self._abort_reported(index)
        self._count_unsent(self._submits[self._sent :], -1)

    def _count_unsent(self, submits: Sequence[Submit], sign: int) -> None:
        self._client.unsent += sign * len(submits)
        self._client.unsent_tokens += sign * sum(len(each.tokens) // 4 for each in submits)

    def abort(self, index: int, report: Callable[[Output], None] | None = None) -> None:
        """Stop sequence `index`. `report` gets its last output."""
        if index in self._open:
            self._open.discard(index)
            self._client.abort(self._ids[index], report)

    def _abort_reported(self, index: int) -> None:
        self.abort(index, None if self._report is None else partial(self._report, index))

    async def outputs(self) -> AsyncIterator[list[tuple[int, Output]]]:
        """Yield batches of (sequence, output) with everything that arrived since the last batch. End with the last sequence.

        Raise EngineGone, or ClientTooSlow if more than `MAX_UNREAD_BYTES` arrived since the last batch was taken.
        """
        while self._open or self._unread_bytes > MAX_UNREAD_BYTES:
            if not self._arrived:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if self._unread_bytes > MAX_UNREAD_BYTES:
                raise ClientTooSlow(f"more than {MAX_UNREAD_BYTES} bytes waited for a client that did not read")
            arrived, self._arrived, self._unread_bytes = self._arrived, [], 0
            batch: list[tuple[int, Output]] = []
            for item in arrived:
                if isinstance(item, EngineGone):
                    raise item
                index, output = item
                if index not in self._open:
                    continue
                if output.finish is not None:
                    self._open.discard(index)
                batch.append(item)
            yield batch

    def _send(self) -> None:
        """Send the next sequences. Raises EngineNotReady."""
        while self._sent < len(self._submits) and self._waiting_tokens < MAX_WAITING_TOKENS:
            index, self._sent = self._sent, self._sent + 1
            submit = self._submits[index]
            self._count_unsent([submit], -1)
            if index not in self._open:
                continue
            is_choice = index > 0 and submit.tokens is self._submits[index - 1].tokens
            self._waiting[index] = 0 if is_choice else max(LEAST_WAITING_TOKENS, len(submit.tokens) // 4)
            self._waiting_tokens += self._waiting[index]
            submit = replace(submit, id=self._ids[index], received_at=time.monotonic(), traced=index < self._traced)
            self._client.send(submit, partial(self._deliver, index))

    def _store(self, index: int, output: Output) -> None:
        self._unread_bytes += 256
        if output.logprobs:
            self._unread_bytes += sum(128 + 64 * len(each.top_ids) for each in output.logprobs)
        if self._unread_bytes <= MAX_UNREAD_BYTES:
            self._arrived.append((index, output))
        else:  # nothing more is stored, so the engine can stop
            for each in tuple(self._open):
                self._abort_reported(each)

    def _deliver(self, index: int, item: Output | EngineGone) -> None:
        """Store an output of a sequence, or the engine's end, and wake `outputs`."""
        if isinstance(item, EngineGone):
            self._arrived.append(item)
        else:
            self._store(index, item)
            if index in self._waiting and not item.error:
                self._waiting_tokens -= self._waiting.pop(index)
                self._send()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
