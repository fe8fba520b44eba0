"""The API's view of the engine: submit requests, receive outputs, and know whether it is alive."""

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fairlead_index.arrival_rate import ArrivalRate
from fairlead_index.worker_load import PRIOR_RATE
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
    PrefixCacheReset,
    Ready,
    ResetPrefixCache,
    Step,
    Stop,
    Submit,
    UnloadAdapter,
)
from fairlead_worker.ipc.transport import ZmqChannel

logger = logging.getLogger(__name__)

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


class EngineNotReady(EngineGone):
    """The engine had ended or was not ready when the request came, so it never received the request."""


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


Deliver = Callable[[Output | EngineGone], None]


class EngineClient:
    """Communicates with one engine over a channel. `run()` must be running."""

    def __init__(self, channel: ZmqChannel) -> None:
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
        self.grammars_pending = 0
        """Requests whose grammar is being checked or waits for that. The engine does not know them yet."""
        self.unsent = self.unsent_tokens = 0
        """Sequences, and their prompt tokens, that wait until earlier ones of their request have started."""
        self._numbers = itertools.count()
        self._changes: dict[int, asyncio.Future[AdapterChanged]] = {}
        """LoRA adapter changes that the engine has not answered yet."""
        self._questions: deque[asyncio.Future[Any]] = deque()
        """Other questions that the engine has not answered yet. It answers them in order."""

    @property
    def serving(self) -> bool:
        return self.state.phase == "ready"

    @property
    def num_waiting(self) -> int:
        """Return the number of sequences that wait for their first token."""
        return len(self._awaiting_first_token)

    def add_request(self, sequences: int, tenant: str) -> list[str]:
        """Count a request, and its sequences as waiting for their first tokens, whether or not they are sent already. Return their ids.

        Raises EngineNotReady.
        """
        self._arrivals.record(time.monotonic())
        self._check_serving()
        ids = [f"r{next(self._numbers)}" for _ in range(sequences)]
        self._awaiting_first_token.update(dict.fromkeys(ids, tenant))
        self.waiting_by_tenant[tenant] += sequences
        return ids

    def _stop_waiting(self, id: str) -> None:
        tenant = self._awaiting_first_token.pop(id, None)
        if tenant is not None:
            self.waiting_by_tenant[tenant] -= 1
            if not self.waiting_by_tenant[tenant]:
                del self.waiting_by_tenant[tenant]

    @property
    def arrival_rate(self) -> float:
        """Requests received per second lately."""
        return self._arrivals.per_second(time.monotonic())

    def estimate_wait(self) -> float:
        """Return the seconds until all waiting prompts are computed, at the measured prefill rate or the assumed one."""
        load = self.state.load
        return load.backlog_tokens / (load.prefill_rate or PRIOR_RATE) + load.step_seconds

    def send(self, submit: Submit, deliver: Deliver) -> None:
        """Send a request to the engine. `deliver` receives its outputs, or EngineGone. Raises EngineNotReady."""
        self._check_serving()
        self._channel.send(submit)
        self._receivers[submit.id] = deliver

    def _check_serving(self) -> None:
        if not self.serving:
            raise EngineNotReady(self.state.reason or "the engine is not ready")

    def abort(self, id: str, report: Callable[[Output], None] | None = None) -> None:
        """End a sequence. `report` gets its last output, with what was computed."""
        self._stop_waiting(id)
        if self._receivers.pop(id, None) is not None and self.serving:
            self._channel.send(Abort(id=id))
            if report is not None:
                self._receivers[id] = lambda item: report(item) if isinstance(item, Output) and item.finish is not None else None

    async def change_adapter(self, message: FetchAdapter | LoadAdapter | UnloadAdapter) -> AdapterChanged:
        """Send an adapter change and return its result. Raise EngineGone.

        The result arrives after the engine's current step, or for `FetchAdapter` once the other nodes have answered.
        """
        self._check_serving()
        change: asyncio.Future[AdapterChanged] = asyncio.get_running_loop().create_future()
        self._changes[message.number] = change
        self._channel.send(message)
        return await change

    async def hot_prefixes(self, tokens: int) -> tuple[HotPrefix, ...]:
        """Return the prefixes that the most requests shared, with at most `tokens` tokens together, after the current step."""
        found: tuple[HotPrefix, ...] = await self._ask(GetHotPrefixes(tokens)) if self.serving else ()
        return found

    async def reset_prefix_cache(self) -> int:
        """Drop the cached KV that no request uses. Return the number of pages. Raise EngineNotReady."""
        pages: int = await self._ask(ResetPrefixCache())
        return pages

    async def _ask(self, question: GetHotPrefixes | ResetPrefixCache) -> Any:
        self._check_serving()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions.append(answer)
        self._channel.send(question)
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
        for answer in (*self._changes.values(), *self._questions):
            if not answer.done():
                answer.set_exception(EngineGone(self.state.reason))
        self._changes.clear()
        self._questions.clear()
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
                _answer(self._changes.pop(number, None), message)
            case HotPrefixes(prefixes=found) | PrefixCacheReset(pages=found):
                # none after `mark_failed`, which has answered all questions
                _answer(self._questions.popleft() if self._questions else None, found)
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


def _answer(waiting: "asyncio.Future[Any] | None", result: object) -> None:
    """Hand over a result, unless the request that waited for it has ended."""
    if waiting is not None and not waiting.done():
        waiting.set_result(result)
