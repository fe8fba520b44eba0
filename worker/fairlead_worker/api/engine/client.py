"""The API's view of the engine: submit requests, receive outputs, and know whether it is alive."""

import asyncio
import itertools
import logging
import time
from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fairlead_index.arrival_rate import ArrivalRate
from fairlead_worker.api.engine.start_up import StartUp
from fairlead_worker.ipc.messages import (
    Abort,
    AdapterChanged,
    CacheEvent,
    Failed,
    FetchAdapter,
    FromEngine,
    GetHotPrefixes,
    HotPrefix,
    HotPrefixes,
    Load,
    LoadAdapter,
    Loading,
    Output,
    PoolingKind,
    PrefixCacheReset,
    Ready,
    ResetPrefixCache,
    Sampling,
    Step,
    Stop,
    Submit,
    UnloadAdapter,
    Withdraw,
)
from fairlead_worker.ipc.transport import Channel

logger = logging.getLogger(__name__)

DEFAULT_PREFILL_RATE = 2000.0
"""Prompt tokens per second, before a rate is measured."""

MAX_UNREAD_BYTES = 64 << 20
"""Approximate bytes of outputs that may wait for one slow client."""

Phase = Literal["starting", "loading", "ready", "failed"]


STAGES = {
    "imports": "Starting",
    "nodes": "Waiting",
    "config": "Starting",
    "wait": "Waiting",
    "download": "Downloading",
    "weights": "Loading",
    "fuse": "Preparing",
    "compile": "Preparing",
    "profile": "Preparing",
    "capture": "Preparing",
    "cache": "Preparing",
    "trial": "Preparing",
    "warmup": "Preparing",
}
"""Phases of a load, mapped to the stages of `status.loading`."""


class EngineGone(Exception):
    """The engine has ended. Its requests get no further outputs."""


class ClientTooSlow(Exception):
    """Too many outputs wait for a client that does not read."""


class EngineNotReady(EngineGone):
    """The engine had ended or was not ready when the request came, so it never received the request."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One sequence to generate."""

    tokens: "array[int]"
    sampling: Sampling
    root: int
    priority: int = 0
    tenant: str = ""
    adapter: int = 0
    grammar: str = ""
    pooling: PoolingKind | None = None
    """Set for a pooling request, which needs hidden states and generates nothing."""
    due_at: float = 0.0
    """When its first token is due, in `time.monotonic` seconds; 0: no deadline."""
    attempt: str = ""
    """The router's name for this attempt of the request, by which it can withdraw it; empty: it cannot."""


@dataclass(slots=True)
class EngineState:
    """The known state of the engine."""

    phase: Phase = "starting"
    step: str = "starting the engine"
    stage: str = "Starting"
    """The step as a stage of `status.loading`."""
    percent: int = 0
    done: int = 0
    """Bytes of `total` that are loaded. Both are 0 in steps that count no bytes."""
    total: int = 0
    beat: int = 0
    """Progress that no other field shows; see `messages.Loading`."""
    start_up: StartUp = field(default_factory=lambda: StartUp(time.monotonic()))
    """Seconds of each start-up phase."""
    last_progress_at: float = field(default_factory=time.monotonic)
    """Monotonic time of the load's last progress."""
    reason: str = ""
    ready: Ready | None = None
    load: Load = field(default_factory=Load)
    last_message_at: float = 0.0
    """Monotonic time of the engine's last message."""
    stall_seconds: float = 0.0
    """Seconds since the start that other requests' prefill would have delayed a decode that ran all the time."""


MAX_WAITING_TOKENS = 16_384
"""Prompt tokens of one API request that wait in the engine at a time. It takes prompts in their order of arrival, so a list of a thousand
prompts would delay everybody's next request by all of them."""


class Generation:
    """Outputs of one API request's submissions as they arrive. Leaving the context aborts unfinished ones.

    A submission is sent when the earlier ones that have no output yet have less than MAX_WAITING_TOKENS tokens.
    """

    def __init__(self, client: "EngineClient", submissions: Sequence[Submission], traced: int = 0) -> None:
        """`traced`: number of submissions, the first ones, whose prefill chunks the engine reports."""
        self._client = client
        self._traced = traced
        self._arrived: list[tuple[int, Output] | EngineGone] = []
        self._unread_bytes = 0
        """Approximate bytes of `_arrived`."""
        self._waiter: asyncio.Future[None] | None = None
        """Set while `outputs` waits for the first output. A list and a future: a queue's locks and waiters cost more at every token."""
        self._ids = [client.next_id() for _ in submissions]
        self._open = set(range(len(submissions)))
        self._submissions = submissions
        self._sent = 0
        """Submissions that the engine has got, the first ones."""
        self._waiting: dict[int, int] = {}
        """Prompt tokens of each submission that was sent and has no output. Choices of one prompt count once."""
        self._waiting_tokens = 0
        self._attempt = submissions[0].attempt if submissions else ""

    async def __aenter__(self) -> "Generation":
        self._client.record_arrival()
        self._client.await_first_tokens(self._ids, self._submissions[0].tenant if self._submissions else "")
        self._count_unsent(self._submissions, 1)
        self._send()
        if self._attempt:
            self._client.attempts[self._attempt] = self
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._client.attempts.get(self._attempt) is self:
            del self._client.attempts[self._attempt]
        for index in tuple(self._open):
            self.abort(index)
        self._count_unsent(self._submissions[self._sent :], -1)

    def _count_unsent(self, submissions: Sequence[Submission], sign: int) -> None:
        self._client.unsent += sign * len(submissions)
        self._client.unsent_tokens += sign * sum(len(each.tokens) for each in submissions)

    def abort(self, index: int) -> None:
        """Stop submission `index`: its client disconnected, or a stop string was found."""
        if index in self._open:
            self._open.discard(index)
            self._client.abort(self._ids[index])

    def withdraw(self) -> None:
        """Ask the engine to drop the submissions if none of them has started. Their outputs then say `WITHDRAWN`."""
        self._client.withdraw(self._ids[: self._sent])

    async def outputs(self) -> AsyncIterator[list[tuple[int, Output]]]:
        """Yield batches of (submission, output) with everything that arrived since the last batch. End with the last submission.

        Raise EngineGone, or ClientTooSlow if more than `MAX_UNREAD_BYTES` arrived since the last batch was taken.
        """
        while self._open or self._unread_bytes > MAX_UNREAD_BYTES:
            if not self._arrived:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if self._unread_bytes > MAX_UNREAD_BYTES:
                raise ClientTooSlow(f"more than {MAX_UNREAD_BYTES} bytes waited for a client that did not read")
            arrived, self._arrived, self._unread_bytes = self._arrived, [], 0
            batch = [self._raise_if_ended(item) for item in arrived]
            yield [(index, output) for index, output in batch if self._is_wanted(index, output)]

    def _is_wanted(self, index: int, output: Output) -> bool:
        if index not in self._open:
            return False
        if output.finish is not None:
            self._open.discard(index)
        return True

    @staticmethod
    def _raise_if_ended(item: tuple[int, Output] | EngineGone) -> tuple[int, Output]:
        if isinstance(item, EngineGone):
            raise item
        return item

    def _send(self) -> None:
        """Send the next submissions. Raises EngineNotReady."""
        while self._sent < len(self._submissions) and self._waiting_tokens < MAX_WAITING_TOKENS:
            index, self._sent = self._sent, self._sent + 1
            submission = self._submissions[index]
            self._count_unsent([submission], -1)
            if index not in self._open:
                continue
            is_choice = index > 0 and submission.tokens is self._submissions[index - 1].tokens
            self._waiting[index] = 0 if is_choice else len(submission.tokens)
            self._waiting_tokens += self._waiting[index]
            self._client.register(self._ids[index], submission, self._make_deliver(index), traced=index < self._traced)

    def _store(self, index: int, output: Output) -> None:
        self._unread_bytes += 256 + sum(128 + 64 * len(each.top_ids) for each in output.logprobs)
        if self._unread_bytes <= MAX_UNREAD_BYTES:
            self._arrived.append((index, output))
        else:  # nothing more is stored, so the engine can stop
            for each in tuple(self._open):
                self.abort(each)

    def _make_deliver(self, index: int) -> "Deliver":
        def deliver(item: Output | EngineGone) -> None:
            if isinstance(item, EngineGone):
                self._arrived.append(item)
            else:
                self._store(index, item)
                if index in self._waiting and not item.error:
                    self._waiting_tokens -= self._waiting.pop(index)
                    self._send()
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

        return deliver


Deliver = Callable[[Output | EngineGone], None]


class EngineClient:
    """Communicates with one engine over a channel. `run()` must be running."""

    def __init__(self, channel: Channel) -> None:
        self.state = EngineState()
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.on_events: Callable[[Sequence[CacheEvent]], None] = lambda events: None
        self.on_load: Callable[[Load], None] = lambda load: None
        self._arrivals = ArrivalRate()
        self.on_step: Callable[[Step], None] = lambda step: None
        self._channel = channel
        self._receivers: dict[str, Deliver] = {}
        self._awaiting_first_token: dict[str, str] = {}
        """The tenant of each sequence that waits."""
        self.waiting_by_tenant = Counter[str]()
        self.attempts: dict[str, Generation] = {}
        """Requests that the router can withdraw, by its name of the attempt."""
        self.grammars_pending = 0
        """Requests whose grammar is being checked or waits for that. The engine does not know them yet."""
        self.unsent = self.unsent_tokens = 0
        """Sequences, and their prompt tokens, that wait until earlier ones of their request have started."""
        self._numbers = itertools.count()
        self._changes: dict[int, asyncio.Future[AdapterChanged]] = {}
        """LoRA adapter changes that the engine has not answered yet."""
        self._hot_prefix_requests: deque[asyncio.Future[tuple[HotPrefix, ...]]] = deque()
        self._resets: deque[asyncio.Future[int]] = deque()

    @property
    def serving(self) -> bool:
        return self.state.phase == "ready"

    @property
    def num_waiting(self) -> int:
        """Return the number of sequences that wait for their first token."""
        return len(self._awaiting_first_token)

    def await_first_tokens(self, ids: Sequence[str], tenant: str) -> None:
        """Count sequences as waiting, whether or not they are sent already. Raises EngineNotReady."""
        self._check_serving()
        self._awaiting_first_token.update(dict.fromkeys(ids, tenant))
        self.waiting_by_tenant[tenant] += len(ids)

    def _stop_waiting(self, id: str) -> None:
        tenant = self._awaiting_first_token.pop(id, None)
        if tenant is not None:
            self.waiting_by_tenant[tenant] -= 1
            if not self.waiting_by_tenant[tenant]:
                del self.waiting_by_tenant[tenant]

    def record_arrival(self) -> None:
        """Count a request, whatever the number of its sequences."""
        self._arrivals.record(time.monotonic())

    @property
    def arrival_rate(self) -> float:
        """Requests received per second lately."""
        return self._arrivals.per_second(time.monotonic())

    def estimate_wait(self) -> float:
        """Return the seconds until all waiting prompts are computed, from the measured or the default prefill rate."""
        load = self.state.load
        return load.backlog_tokens / (load.prefill_rate or DEFAULT_PREFILL_RATE) + load.step_seconds

    def next_id(self) -> str:
        return f"r{next(self._numbers)}"

    def generate(self, submissions: Sequence[Submission], traced: int = 0) -> Generation:
        return Generation(self, submissions, traced)

    def register(self, id: str, submission: Submission, deliver: Deliver, traced: bool = False) -> None:
        """Send a request to the engine. `deliver` receives its outputs, or EngineGone. Raises EngineNotReady."""
        self._check_serving()
        self._channel.send(
            Submit(
                id=id,
                tokens=submission.tokens.tobytes(),
                sampling=submission.sampling,
                root=submission.root,
                priority=submission.priority,
                tenant=submission.tenant,
                adapter=submission.adapter,
                grammar=submission.grammar,
                pooling=submission.pooling,
                received_at=time.monotonic(),
                due_at=submission.due_at,
                traced=traced,
            )
        )
        self._receivers[id] = deliver

    def _check_serving(self) -> None:
        if not self.serving:
            raise EngineNotReady(self.state.reason or "the engine is not ready")

    def abort(self, id: str) -> None:
        self._stop_waiting(id)
        if self._receivers.pop(id, None) is not None and self.serving:
            self._channel.send(Abort(id=id))

    def withdraw(self, ids: Sequence[str]) -> None:
        if self.serving:
            self._channel.send(Withdraw(tuple(ids)))

    async def change_adapter(self, message: FetchAdapter | LoadAdapter | UnloadAdapter) -> AdapterChanged:
        """Send an adapter change and return its result. Raise EngineGone.

        The result arrives after the engine's current step, or for `FetchAdapter` once the other nodes have answered.
        """
        if not self.serving:
            raise EngineNotReady(self.state.reason or "the engine is not ready")
        change: asyncio.Future[AdapterChanged] = asyncio.get_running_loop().create_future()
        self._changes[message.number] = change
        self._channel.send(message)
        return await change

    async def hot_prefixes(self, tokens: int) -> tuple[HotPrefix, ...]:
        """Return the prefixes that the most requests shared, with at most `tokens` tokens together, after the current step."""
        if not self.serving:
            return ()
        answer: asyncio.Future[tuple[HotPrefix, ...]] = asyncio.get_running_loop().create_future()
        self._hot_prefix_requests.append(answer)
        self._channel.send(GetHotPrefixes(tokens))
        return await answer

    async def reset_prefix_cache(self) -> int:
        """Drop the cached KV that no request uses. Return the number of pages. Raise EngineNotReady."""
        if not self.serving:
            raise EngineNotReady(self.state.reason or "the engine is not ready")
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._resets.append(answer)
        self._channel.send(ResetPrefixCache())
        return await answer

    def stop(self) -> None:
        """Tell the engine to end after its current step."""
        self._channel.send(Stop())

    def seconds_since_message(self) -> float:
        """Return seconds since the engine's last message, or 0 until it is ready, because loading may take long."""
        return time.monotonic() - self.state.last_message_at if self.serving else 0.0

    def seconds_without_progress(self) -> float:
        """Return seconds since a load's last progress, or 0 if nothing loads."""
        return time.monotonic() - self.state.last_progress_at if self.state.phase in ("starting", "loading") else 0.0

    async def run(self) -> None:
        """Receive messages until cancelled."""
        while True:
            self._handle(await self._channel.receive())

    def mark_failed(self, reason: str) -> None:
        """Record the engine's end and fail its requests. The first reason stays, because it is closest to the cause."""
        if self.state.phase != "failed":
            self.state.phase = "failed"
            self.state.reason = reason
            logger.error("engine: %s", reason)
        receivers, self._receivers = self._receivers, {}
        self._awaiting_first_token.clear()
        self.waiting_by_tenant.clear()
        for deliver in receivers.values():
            deliver(EngineGone(self.state.reason))
        changes, self._changes = self._changes, {}
        for change in changes.values():
            if not change.done():
                change.set_exception(EngineGone(self.state.reason))
        requests: list[asyncio.Future[Any]] = [*self._hot_prefix_requests, *self._resets]
        self._hot_prefix_requests.clear()
        self._resets.clear()
        for answer in requests:
            if not answer.done():
                answer.set_exception(EngineGone(self.state.reason))
        self.ended.set()

    def _handle(self, message: FromEngine) -> None:
        self.state.last_message_at = time.monotonic()
        match message:
            case Step():
                self._handle_step(message)
            case Loading():
                if self.state.phase in ("starting", "loading"):
                    self._handle_loading(message)
            case Ready():
                if self.state.phase != "failed":
                    self.state.phase, self.state.step, self.state.percent, self.state.ready = "ready", "ready", 100, message
                    self.state.start_up.enter("prompts", self.state.last_message_at)
                    self.state.load = Load(pages_total=message.pages, pages_free=message.pages)
                    self.ready.set()
            case AdapterChanged(number=number):
                change = self._changes.pop(number, None)
                if change is not None and not change.done():
                    change.set_result(message)
            case HotPrefixes(prefixes=prefixes):
                # none after `mark_failed`, which has answered all requests
                answer = self._hot_prefix_requests.popleft() if self._hot_prefix_requests else None
                if answer is not None and not answer.done():  # the requester may have disconnected
                    answer.set_result(prefixes)
            case PrefixCacheReset(pages=pages):
                reset = self._resets.popleft() if self._resets else None
                if reset is not None and not reset.done():
                    reset.set_result(pages)
            case Failed(reason=reason):
                self.mark_failed(reason)

    def _handle_loading(self, message: Loading) -> None:
        state, step = self.state, f"{message.phase} {message.detail}".strip()
        if step != state.step:
            logger.info("loading: %s", step)
        state.start_up.enter(message.phase, state.last_message_at)
        if (step, message.percent, message.done, message.beat) != (state.step, state.percent, state.done, state.beat):
            state.last_progress_at = state.last_message_at
        state.phase, state.step, state.stage, state.percent = "loading", step, STAGES.get(message.phase, "Loading"), message.percent
        state.done, state.total, state.beat = message.done, message.total, message.beat

    def _handle_step(self, step: Step) -> None:
        if step.load is not None:
            load, unknown = step.load, self.grammars_pending + self.unsent
            if unknown:
                backlog = load.backlog_tokens + self.unsent_tokens
                load = msgspec.structs.replace(load, waiting=load.waiting + unknown, backlog_tokens=backlog)
            self.state.load = load
            self.on_load(load)
        if step.seconds:
            self.state.stall_seconds += step.stall_seconds
            self.on_step(step)
        if step.events:
            self.on_events(step.events)
        for output in step.each():
            self._stop_waiting(output.id)
            deliver = self._receivers.get(output.id)
            if deliver is None:
                continue
            if output.finish is not None:
                del self._receivers[output.id]
            deliver(output)
