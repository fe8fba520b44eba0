"""The API's view of the engine: submit requests, receive what they bring, know whether it lives."""

import asyncio
import itertools
import logging
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from fairlead_worker.api.engine.start_up import StartUp
from fairlead_worker.messages import (
    Abort,
    AdapterChanged,
    CacheEvent,
    Failed,
    FetchAdapter,
    FromEngine,
    GetHotPrefixes,
    Hot,
    HotPrefix,
    Load,
    LoadAdapter,
    Loading,
    Output,
    PoolingKind,
    Ready,
    Sampling,
    Step,
    Stop,
    Submit,
    UnloadAdapter,
)
from fairlead_worker.transport import Channel

logger = logging.getLogger(__name__)

UNKNOWN_RATE = 2000.0
"""Prompt tokens a second, before any were measured."""

MOST_BEHIND = 64 << 20
"""Bytes, roughly, of outputs that wait for one client to take what came before them."""

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
    "rehearsal": "Preparing",
}
"""Steps of a load, in the words of `status.loading`."""


class EngineGone(Exception):
    """The engine has ended; nothing more comes of its requests."""


class ClientTooSlow(Exception):
    """Too much has come for a client that takes nothing."""


class EngineRefuses(EngineGone):
    """The engine had ended, or was not ready yet, when the request came: it never saw it."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One sequence to be generated."""

    tokens: "array[int]"
    sampling: Sampling
    root: int
    priority: int = 0
    tenant: str = ""
    adapter: int = 0
    grammar: str = ""
    pooling: PoolingKind | None = None
    """Not to be generated: its hidden states are wanted."""


@dataclass(slots=True)
class EngineState:
    """What is known of the engine."""

    phase: Phase = "starting"
    step: str = "starting the engine"
    stage: str = "Starting"
    """The step in the words of `status.loading`."""
    percent: int = 0
    done: int = 0
    """Bytes of `total` that are there; both 0 in steps that count none."""
    total: int = 0
    beat: int = 0
    """Of what gets on elsewhere: `messages.Loading`."""
    start_up: StartUp = field(default_factory=lambda: StartUp(time.monotonic()))
    """How long each phase took."""
    advanced: float = field(default_factory=time.monotonic)
    """Monotonic time at which the load last got on."""
    reason: str = ""
    ready: Ready | None = None
    load: Load = field(default_factory=Load)
    heard: float = 0.0
    """Monotonic time of the engine's last message."""
    stall_seconds: float = 0.0
    """How long a decode that ran all the time would have waited for others' prefill, since the start."""


class Generation:
    """The outputs of one API request's submissions, as they come. Leaving the context aborts what is unfinished."""

    def __init__(self, client: "EngineClient", submissions: Sequence[Submission]) -> None:
        self._client = client
        self._arrived: list[tuple[int, Output] | EngineGone] = []
        self._behind = 0
        """Bytes of them, roughly."""
        self._waiter: asyncio.Future[None] | None = None
        """Who waits for the first of them: a list and a future, for a queue's locks and waiters cost more at every token."""
        self._ids = [client.next_id() for _ in submissions]
        self._open = set(range(len(submissions)))
        self._submissions = submissions

    async def __aenter__(self) -> "Generation":
        for index, submission in enumerate(self._submissions):
            self._client.register(self._ids[index], submission, self._deliverer(index))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for index in tuple(self._open):
            self.abort(index)

    def abort(self, index: int) -> None:
        """Submission `index` needs nothing more: its client has gone, or a stop string was met."""
        if index in self._open:
            self._open.discard(index)
            self._client.abort(self._ids[index])

    async def outputs(self) -> AsyncIterator[list[tuple[int, Output]]]:
        """Batches of (submission, output): all that has come since the last. Ends with the last submission.

        Raises `EngineGone`; `ClientTooSlow` where more than `MOST_BEHIND` came since the last batch was asked for.
        """
        while self._open or self._behind > MOST_BEHIND:
            if not self._arrived:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if self._behind > MOST_BEHIND:
                raise ClientTooSlow(f"more than {MOST_BEHIND} bytes waited for a client that did not read")
            arrived, self._arrived, self._behind = self._arrived, [], 0
            batch = [self._checked(item) for item in arrived]
            yield [(index, output) for index, output in batch if self._takes(index, output)]

    def _takes(self, index: int, output: Output) -> bool:
        if index not in self._open:
            return False
        if output.finish is not None:
            self._open.discard(index)
        return True

    @staticmethod
    def _checked(item: tuple[int, Output] | EngineGone) -> tuple[int, Output]:
        if isinstance(item, EngineGone):
            raise item
        return item

    def _take_in(self, index: int, output: Output) -> None:
        self._behind += 256 + sum(128 + 64 * len(each.top_ids) for each in output.logprobs)
        if self._behind <= MOST_BEHIND:
            self._arrived.append((index, output))
        else:  # nothing more of it is kept, and the engine need not go on
            for each in tuple(self._open):
                self.abort(each)

    def _deliverer(self, index: int) -> "Deliver":
        def deliver(item: Output | EngineGone) -> None:
            if isinstance(item, EngineGone):
                self._arrived.append(item)
            else:
                self._take_in(index, item)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

        return deliver


Deliver = Callable[[Output | EngineGone], None]


class EngineClient:
    """Speaks with one engine over a channel. `run()` must be running."""

    def __init__(self, channel: Channel) -> None:
        self.state = EngineState()
        self.ready = asyncio.Event()
        self.gone = asyncio.Event()
        self.on_events: Callable[[Sequence[CacheEvent]], None] = lambda events: None
        self.on_load: Callable[[Load], None] = lambda load: None
        self.on_step: Callable[[Step], None] = lambda step: None
        self._channel = channel
        self._receivers: dict[str, Deliver] = {}
        self._unbegun: set[str] = set()
        self.checked = 0
        """Requests whose grammar is being tried, or waits for that, before the engine knows of them."""
        self._numbers = itertools.count()
        self._changes: dict[int, asyncio.Future[AdapterChanged]] = {}
        """LoRA adapters that the engine was asked to load or unload."""
        self._asked: deque[asyncio.Future[tuple[HotPrefix, ...]]] = deque()

    @property
    def serving(self) -> bool:
        return self.state.phase == "ready"

    @property
    def unbegun(self) -> int:
        """Sequences that wait for their first token."""
        return len(self._unbegun)

    def expected_wait(self) -> float:
        """Seconds until what waits now has been begun: by the prefill rate, or a guess of one where none was measured."""
        load = self.state.load
        return load.backlog_tokens / (load.prefill_rate or UNKNOWN_RATE) + load.step_seconds

    def next_id(self) -> str:
        return f"r{next(self._numbers)}"

    def generate(self, submissions: Sequence[Submission]) -> Generation:
        return Generation(self, submissions)

    def register(self, id: str, submission: Submission, deliver: Deliver) -> None:
        """Send a request to the engine; `deliver` gets its outputs, or the news that the engine has gone."""
        if not self.serving:
            raise EngineRefuses(self.state.reason or "the engine is not ready")
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
            )
        )
        self._receivers[id] = deliver
        self._unbegun.add(id)

    def abort(self, id: str) -> None:
        self._unbegun.discard(id)
        if self._receivers.pop(id, None) is not None and self.serving:
            self._channel.send(Abort(id=id))

    async def change_adapter(self, message: FetchAdapter | LoadAdapter | UnloadAdapter) -> AdapterChanged:
        """What came of it, after the engine's current step, or of a `FetchAdapter` once other nodes have said. Raises EngineGone."""
        if not self.serving:
            raise EngineRefuses(self.state.reason or "the engine is not ready")
        change: asyncio.Future[AdapterChanged] = asyncio.get_running_loop().create_future()
        self._changes[message.number] = change
        self._channel.send(message)
        return await change

    async def hottest(self, tokens: int) -> tuple[HotPrefix, ...]:
        """The prefixes that most requests shared, of at most `tokens` tokens together; after the step under way."""
        if not self.serving:
            return ()
        answer: asyncio.Future[tuple[HotPrefix, ...]] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._channel.send(GetHotPrefixes(tokens))
        return await answer

    def stop(self) -> None:
        """Ask the engine to end after its current step."""
        self._channel.send(Stop())

    def silent_for(self) -> float:
        """Seconds since the engine was heard; 0 until it is ready, since loading may be long."""
        return time.monotonic() - self.state.heard if self.serving else 0.0

    def stuck_for(self) -> float:
        """Seconds since a load last got on; 0 when nothing loads."""
        return time.monotonic() - self.state.advanced if self.state.phase in ("starting", "loading") else 0.0

    async def run(self) -> None:
        """Receive until cancelled."""
        while True:
            self._take(await self._channel.receive())

    def died(self, reason: str) -> None:
        """The engine has ended. The first reason stands: it is nearest to the cause."""
        if self.state.phase != "failed":
            self.state.phase = "failed"
            self.state.reason = reason
            logger.error("engine: %s", reason)
        receivers, self._receivers = self._receivers, {}
        self._unbegun.clear()
        for deliver in receivers.values():
            deliver(EngineGone(self.state.reason))
        changes, self._changes = self._changes, {}
        for change in changes.values():
            if not change.done():
                change.set_exception(EngineGone(self.state.reason))
        asked, self._asked = self._asked, deque()
        for answer in asked:
            if not answer.done():
                answer.set_exception(EngineGone(self.state.reason))
        self.gone.set()

    def _take(self, message: FromEngine) -> None:
        self.state.heard = time.monotonic()
        match message:
            case Step():
                self._step(message)
            case Loading():
                if self.state.phase in ("starting", "loading"):
                    self._loading(message)
            case Ready():
                if self.state.phase != "failed":
                    self.state.phase, self.state.step, self.state.percent, self.state.ready = "ready", "ready", 100, message
                    self.state.start_up.enter("prompts", self.state.heard)
                    self.state.load = Load(pages_total=message.pages, pages_free=message.pages)
                    self.ready.set()
            case AdapterChanged(number=number):
                change = self._changes.pop(number, None)
                if change is not None and not change.done():
                    change.set_result(message)
            case Hot(prefixes=prefixes):
                answer = self._asked.popleft() if self._asked else None  # none: `died` has told all who asked
                if answer is not None and not answer.done():  # whoever asked may have gone
                    answer.set_result(prefixes)
            case Failed(reason=reason):
                self.died(reason)

    def _loading(self, message: Loading) -> None:
        state, step = self.state, f"{message.phase} {message.detail}".strip()
        if step != state.step:
            logger.info("loading: %s", step)
        state.start_up.enter(message.phase, state.heard)
        if (step, message.percent, message.done, message.beat) != (state.step, state.percent, state.done, state.beat):
            state.advanced = state.heard
        state.phase, state.step, state.stage, state.percent = "loading", step, STAGES.get(message.phase, "Loading"), message.percent
        state.done, state.total, state.beat = message.done, message.total, message.beat

    def _step(self, step: Step) -> None:
        if step.load is not None:
            load = msgspec.structs.replace(step.load, waiting=step.load.waiting + self.checked) if self.checked else step.load
            self.state.load = load
            self.on_load(load)
        if step.seconds:
            self.state.stall_seconds += step.stall_seconds
            self.on_step(step)
        if step.events:
            self.on_events(step.events)
        for output in step.each():
            self._unbegun.discard(output.id)
            deliver = self._receivers.get(output.id)
            if deliver is None:
                continue
            if output.finish is not None:
                del self._receivers[output.id]
            deliver(output)
