"""State that all parts of the agent share: its phase, its requests in flight, the engine's load, and the load report for routers."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from fairlead_agent.config import AgentConfig
from fairlead_agent.engine.metrics import EngineStats
from fairlead_agent.engine.pace import PrefillPace
from fairlead_agent.engine.step_time import StepTime
from fairlead_agent.kv.blocks import EngineBlocks
from fairlead_agent.kv.indexed import IndexedBlocks, Promise
from fairlead_agent.kv.publisher import Publisher
from fairlead_common.prompts.encoder import PromptFormat, digest
from fairlead_common.protocols.paths import CHAT, COMPLETIONS, POOLED, RESPONSES
from fairlead_index.arrival_rate import ArrivalRate
from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_index.worker_load import WorkerLoad

Phase = Literal["starting", "loading", "ready", "failed"]


SETTLE_SECONDS = 2.0
"""Seconds after the first byte of an answer in which the engine's events tell which blocks it has computed, also after a replay."""
USUALLY_TAKEN = (COMPLETIONS, CHAT, RESPONSES, *POOLED)
"""Paths whose bodies have vLLM's `cache_salt` and `priority`, as far as an engine does not tell its fields."""
RESERVED_SECONDS = 0.2
"""Age up to which a request is no part of the reported backlog: the reservation of its router counts until then (0.25 s from the choice in
heartbeat.lua, and it was chosen a little before it came here)."""
PROMISED_BLOCKS = 4096
"""Most promised blocks of an engine that does not tell its KV blocks."""


class Pending(msgspec.Struct, eq=False):
    """A request that the engine has not begun to answer. `tokens`: prompt tokens that it has to compute, as far as is known."""

    tokens: int
    streamed: bool
    began: float
    """Monotonic seconds."""
    computed_at: float = 0.0
    """When the engine should have computed it by the measured pace, monotonic seconds; 0: the pace is not known."""
    promise: Promise | None = None
    """Its blocks in the index."""


class Agent:
    """One engine as routers see it."""

    def __init__(self, config: AgentConfig, address: str) -> None:
        self.config, self.address = config, address
        self.phase: Phase = "starting"
        self.reason = ""
        self.percent = 0
        self.draining = False
        self.drained = asyncio.Event()
        """The drain has ended: the engine may be stopped."""
        self.drain_requested = asyncio.Event()
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.start_up: dict[str, float] = {}
        """Seconds of each phase of the start."""
        self.model_names: list[str] = []
        self.adapters: dict[str, str | None] = {}
        """LoRA adapters of the engine: name -> source."""
        self.adapters_changed = asyncio.Event()
        self.fields: Mapping[str, frozenset[str]] = {}
        """Fields of the engine's bodies, by path; empty: it does not tell."""
        self.format: PromptFormat | None = None
        self.format_body, self.format_etag = b"", ""
        self.no_format = "the engine is not ready"
        """Why there is no prompt format."""
        self.stats = EngineStats()
        self.engine_metrics = b""
        self.silent_since: float | None = None
        """Since when the engine has not answered, monotonic seconds; None: it answers, or it is not up."""
        self.blocks: EngineBlocks | None = None
        self.indexed: IndexedBlocks | None = None
        self.publisher: Publisher | None = None
        self.pace = PrefillPace()
        self._step_time = StepTime()
        self.arrivals = ArrivalRate()
        self._pending: dict[Pending, None] = {}
        """Requests without an answer, the oldest first."""
        self._computed_until = 0.0
        """When the engine should have computed all prompts by the measured pace, monotonic seconds."""
        self._scraped_at = 0.0

    @property
    def is_serving(self) -> bool:
        return self.phase == "ready" and not self.draining

    def set_phase(self, phase: Phase, reason: str = "") -> None:
        """Set the phase and its reason. A failure is final."""
        if self.phase == "failed":
            return
        self.phase, self.reason = phase, reason
        self.percent = 100 if phase == "ready" else 0

    def takes(self, path: str, field: str) -> bool:
        """Return whether the engine's bodies for a path have a field."""
        fields = self.fields.get(path)
        return path in USUALLY_TAKEN if fields is None else field in fields

    def set_format(self, format: PromptFormat | None, reason: str = "") -> None:
        """Set what routers tokenize with. `reason`: why there is none."""
        self.format, self.no_format = format, reason
        self.format_body = msgspec.json.encode(format) if format is not None else b""
        self.format_etag = f'"{digest(self.format_body.decode())}"' if format is not None else ""

    def set_stats(self, stats: EngineStats, text: bytes) -> None:
        """Set the newest scrape of the engine, and report it to the index."""
        now, gaps = time.monotonic(), stats.token_gaps - self.stats.token_gaps
        if self.stats.started != stats.started or gaps < 0 or not self._scraped_at:
            self._step_time = StepTime()
        elif gaps:
            self._step_time.record(now, max(0.0, stats.token_gap_seconds - self.stats.token_gap_seconds), gaps)
        if not stats.running:
            self._step_time.pause()
        self.stats, self.engine_metrics, self._scraped_at = stats, text, now
        if self.publisher is not None:
            self.publisher.report(self.load())

    def root_of(self, adapter: str, salt: str) -> int:
        """Return the root of a prompt's hashes. `adapter`: its name, which is what the engine tells its blocks apart by."""
        assert self.format is not None
        return prompt_root(self.format, adapter_digest(adapter), salt)

    def uncached_tokens(self, tokens: Sequence[int], hashes: Sequence[int]) -> int:
        """Return how many tokens of a prompt the engine has to compute, by what it holds or computes for another request."""
        if self.indexed is None or self.format is None:
            return len(tokens)
        return len(tokens) - self.format.block_tokens * self.indexed.count(hashes)

    def hashes_of(self, tokens: Sequence[int], model: str, salt: str) -> Sequence[int]:
        """Return a prompt's blocks as the index has them; none if they cannot be computed."""
        if self.format is None or not tokens:
            return ()
        return block_hashes(self.root_of(model if model in self.adapters else "", salt), tokens, self.format.block_tokens)

    @contextmanager
    def track_request(self) -> Iterator[None]:
        """Count a request that a drain waits for, while the context lasts."""
        self.in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()

    def begin(self, tokens: Sequence[int], model: str, salt: str, streamed: bool, generates: bool) -> Pending:
        """Record a prompt that goes to the engine. Call `answered` for it exactly once.

        `tokens`: empty if unknown. `generates`: False for a pooled prompt, whose blocks no other prompt can use.
        """
        now, hashes = time.monotonic(), self.hashes_of(tokens, model, salt)
        self.arrivals.record(now)
        pending = Pending(self.uncached_tokens(tokens, hashes), streamed, now)
        if rate := self.pace.tokens_per_second:
            pending.computed_at = self._computed_until = max(self._computed_until, now) + pending.tokens / rate
        if generates and self.indexed is not None:
            pending.promise = self.indexed.promise(hashes)
        self._pending[pending] = None
        if streamed:  # a whole answer's first byte comes after its last token, and says nothing about prefill
            self.pace.begin(now)
        return pending

    def answered(self, pending: Pending, is_computed: bool) -> None:
        """Record the first byte of an answer, or its failure (`is_computed`: False)."""
        del self._pending[pending]
        if pending.streamed:
            self.pace.end(time.monotonic(), pending.tokens if is_computed else 0)
        if self.publisher is not None:  # the last scrape may be half a second old, and show a backlog that has been computed
            self.publisher.report(self.load())
        if pending.promise is not None:
            if is_computed:
                asyncio.get_running_loop().call_later(SETTLE_SECONDS, pending.promise.withdraw)
            else:
                pending.promise.withdraw()

    def backlog_tokens(self, now: float) -> int:
        """Return the prompt tokens that the engine has yet to compute, as far as is known.

        A stream begins when its prompt is computed: its tokens count until then, less what was probably computed since the last first
        token.
        The first byte of a whole answer comes when the answer is complete. So its tokens count while all requests wait in the engine. After
        that they count until the measured pace says that the prompt is computed.
        """
        old = [pending for pending in self._pending if now - pending.began > RESERVED_SECONDS]
        streamed = sum(pending.tokens for pending in old if pending.streamed) - self.pace.computed_since(now)
        return round(max(0.0, streamed) + sum(self._uncomputed_of_whole(pending, now) for pending in old if not pending.streamed))

    def _uncomputed_of_whole(self, pending: Pending, now: float) -> float:
        if self.stats.waiting >= len(self._pending):
            return pending.tokens
        if pending.computed_at:
            return min(pending.tokens, max(0.0, pending.computed_at - now) * self.pace.tokens_per_second)
        return 0 if not self.stats.waiting and self._scraped_at > pending.began + RESERVED_SECONDS else pending.tokens

    def load(self) -> WorkerLoad:
        """Return the load as the index has it."""
        stats, now = self.stats, time.monotonic()
        return WorkerLoad(
            running=stats.running,
            waiting=stats.waiting,
            backlog_tokens=self.backlog_tokens(now),
            prefill_rate=self.pace.tokens_per_second,
            step_seconds=self._step_time.seconds(now) if stats.running else 0.0,  # what it was says little about an idle engine
            pages_free=round(stats.blocks * (1.0 - stats.kv_usage)),
            pages_total=stats.blocks,
            page_size=stats.block_size,
            arrival_rate=self.arrivals.per_second(now),
        )

    def describe_load(self) -> dict[str, Any]:
        """Return the document of `/load`, as a worker's."""
        stats = self.stats
        document: dict[str, Any] = {
            "pod": self.config.pod,
            "address": self.address,
            "runtime": self.config.runtime,
            "draining": self.draining,
            "ready": self.is_serving,
            "max_running": 0,  # engines do not tell
            "server_load": self.in_flight,
        }
        if self.publisher is not None and self.publisher.incarnation:
            document["incarnation"] = self.publisher.incarnation
        if self.config.canary:
            document["canary"] = self.config.canary
        if self.adapters:
            base = self.model_names[0] if self.model_names else ""
            document["adapters"] = {
                name: {"digest": adapter_digest(name), "root": root or name, "parent": base} for name, root in self.adapters.items()
            }
        counters = {"prompt_tokens": stats.prompt_tokens, "cached_tokens": stats.cached_tokens, "output_tokens": stats.output_tokens}
        numbers: dict[str, Any] = msgspec.to_builtins(self.load())
        return document | numbers | counters

    def describe_readiness(self) -> dict[str, Any]:
        """Return the document of `/ready`, as a worker's."""
        phase = "draining" if self.draining else self.phase
        document: dict[str, Any] = {"ready": self.is_serving, "phase": phase, "percent": self.percent, "reason": self.reason}
        document["runtime"] = self.config.runtime
        if phase in ("starting", "loading"):
            document |= {"stage": "Loading", "bytes": 0, "total_bytes": 0}
        return document | {"start_up_seconds": {name: round(seconds, 3) for name, seconds in self.start_up.items()}}


def adapter_digest(name: str) -> str:
    """Return the digest of a LoRA adapter for the index; empty for the base model."""
    return digest(name) if name else ""
