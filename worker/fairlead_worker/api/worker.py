"""The state that all endpoints share: the engine, the prompt encoder, and whether this worker accepts requests."""

import asyncio
import gzip
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import msgspec

from fairlead_common.errors import too_many_tokens
from fairlead_common.fair_slots import FairSlots
from fairlead_common.memory import LARGE, trim_heap
from fairlead_common.prompts.encoder import PromptEncoder, PromptError, PromptFormat, PromptTooLong, digest
from fairlead_common.prompts.token_cache import TokenCache
from fairlead_common.truncate import quote
from fairlead_index.hashing import prompt_root
from fairlead_worker.api.engine.adapters import Adapters
from fairlead_worker.api.engine.client import EngineClient
from fairlead_worker.api.errors import ApiError, busy, invalid, too_long, unavailable
from fairlead_worker.api.output.grammar_checker import GrammarChecker
from fairlead_worker.api.output.parsers import OutputParsers
from fairlead_worker.api.request_cpu import RequestCpu, UnreportedCpu
from fairlead_worker.api.response_store import ResponseStore
from fairlead_worker.config import WorkerConfig
from fairlead_worker.grammar.constraint import Constraint
from fairlead_worker.ipc.messages import Ready
from fairlead_worker.parsing.families import select_parsers
from fairlead_worker.platform.version import release

if TYPE_CHECKING:
    from fairlead_worker.api.metrics.worker_metrics import Metrics

logger = logging.getLogger(__name__)

INLINE_ENCODE_SIZE = 4096
"""Characters up to which prompts are tokenized in the event loop. For short prompts, a thread costs more than the work."""
MOST_QUEUES = 8
"""Queue limits that the waiting sequences of all tenants may fill together."""
MIN_COUNTABLE_TOKENS = 1 << 18

Item = TypeVar("Item")
Encoded = TypeVar("Encoded")

MAX_ROOTS = 4096
"""Root hashes to remember, one for each client salt and adapter."""


class Worker:
    """One model replica as the API sees it."""

    def __init__(self, config: WorkerConfig, engine: EngineClient, metrics: "Metrics", address: str) -> None:
        self.config = config
        self.engine = engine
        self.metrics = metrics
        self.address = address
        self.draining = False
        self.warming = False
        """True during prefix warm-up, before the worker accepts requests."""
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.recent_roots: OrderedDict[int, str] = OrderedDict()
        """Root hash of recent requests -> digest of their LoRA adapter, empty for the base model. Peers compute prefixes under these only.
        """
        self.started = int(time.time())
        self.incarnation: Callable[[], str] = lambda: ""
        """The incarnation that the index knows this worker by. Routers use the index's records only if the worker reports the same value.
        """
        self.adapters = Adapters(config, engine)
        self.prompt_etag = ""
        """The ETag of the prompt format, in quotes."""
        self.system_fingerprint: str | None = None
        """OpenAI's `system_fingerprint`: answers of equal requests may differ where it differs."""
        self._gzipped_prompt_format: asyncio.Future[bytes] | None = None
        self._large_encodings = FairSlots(1)
        self.large_answers = FairSlots(1)
        """Turns of tenants to format log-probabilities: the event loop waits up to five milliseconds for each thread that computes."""
        self.large_bodies = FairSlots(1)
        """Turns of tenants to have a large body decoded."""
        self.token_cache = TokenCache()
        limits = config.limits
        self.response_store = (
            ResponseStore(config.redis, config.index_namespace, limits) if config.redis is not None and limits.stored_responses else None
        )
        self.unreported_cpu = UnreportedCpu()
        self._grammars: GrammarChecker | None = None
        self._is_loaded = False
        # Set once the model is loaded. A handler of a path that is served before then calls `check_loaded` first.
        self.ready: Ready
        self.encoder: PromptEncoder
        self.output_parsers: OutputParsers
        self.max_model_len: int
        """Longest prompt plus output in tokens, by the model's context length and by the number of KV pages."""

    def set_ready(self, ready: Ready) -> None:
        """Build the prompt encoder and the output parsers, once the engine is ready."""
        format = msgspec.json.decode(ready.prompt_format, type=PromptFormat)
        self._grammars = GrammarChecker(self.config, format.tokenizer_json, ready.vocabulary_size, ready.eos_token_ids)
        self.ready, self.max_model_len = ready, ready.max_model_len
        self.encoder = PromptEncoder(format, self.token_cache)
        model_parsers, reason = select_parsers(
            self.config.tool_call_parser, self.config.reasoning_parser, (format.chat_template, format.tool_template)
        )
        logger.info("output parsers: %s", reason)
        self.output_parsers = OutputParsers(model_parsers, self.encoder)
        self.adapters.set_initial(ready.adapters)
        self.prompt_etag = f'"{digest(ready.prompt_format.decode())}"'
        self.system_fingerprint = f"fp_{digest(' '.join((release(), ready.backend, ready.cpu_level, self.prompt_etag)))[:12]}"
        self._is_loaded = True

    def root_of(self, adapter: str, salt: str) -> int:
        """Return the root hash of a prompt, and remember it. `adapter`: the digest of the LoRA adapter; empty: the base model."""
        root = prompt_root(self.encoder.format, adapter, salt)
        self.recent_roots[root] = adapter
        self.recent_roots.move_to_end(root)
        if len(self.recent_roots) > MAX_ROOTS:
            self.recent_roots.popitem(last=False)
        return root

    @property
    def serving(self) -> bool:
        return self._is_loaded and self.engine.serving and not self.draining and not self.warming

    @property
    def fallback(self) -> str:
        """Return why the engine runs without CUDA graphs or overlap although they were wanted; empty: no fallback, or not loaded."""
        return self.ready.modes.fallback if self._is_loaded else ""

    @property
    def healthy(self) -> bool:
        """Return whether the engine is alive, as far as is known."""
        if self.engine.state.phase == "failed" or self.engine.seconds_without_progress() >= self.config.limits.load_timeout:
            return False
        return self.engine.seconds_since_message() < self.config.limits.engine_timeout

    def check_serving(self) -> None:
        """Raise the 503 that sends the router to another pod, unless this worker accepts requests."""
        if self.draining:
            raise unavailable("this worker is shutting down")
        state = self.engine.state
        if state.phase == "failed":
            raise unavailable(f"the engine has ended: {state.reason}")
        if self.warming:
            raise unavailable("this worker is warming up and accepts no requests yet")
        if not self._is_loaded or state.phase != "ready":
            raise unavailable(f"the model is not loaded yet: {state.step}, {state.percent} %")

    def check_loaded(self) -> None:
        """Raise ApiError 503 until the model is loaded."""
        if not self._is_loaded:
            raise unavailable("the model is not loaded yet")

    def check_queue_limit(self, sequences: int, tenant: str) -> None:
        """Raise the 429 that sends the router to another pod if `sequences` more of a tenant would exceed the waiting limit.

        A tenant of which nothing waits may always send one request: another's list may fill the limit, and a request with more sequences
        than the limit could never be served. Several tenants share the limit equally. MOST_QUEUES bounds what all of them may send:
        without a router, a client chooses its name.
        """
        limit, waiting, own = self.config.max_waiting_requests, self.engine.num_waiting, self.engine.waiting_by_tenant[tenant]
        if not limit or waiting + sequences <= limit:
            return
        share = limit // max(1, len(+self.engine.waiting_by_tenant))
        if (own and own + sequences > share) or waiting > MOST_QUEUES * limit:
            message = f"{waiting} sequences wait for their first token, and the limit is {limit} (--max-waiting-requests)"
            raise busy(message, max(1, round(self.engine.estimate_wait())))

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

    @property
    def max_countable_tokens(self) -> int:
        """Longest prompt in tokens that is tokenized although the context length does not bound it: to count or to truncate it."""
        return max(2 * self.max_model_len, MIN_COUNTABLE_TOKENS)

    def check_model(self, name: str | None) -> str:
        """Return the model name for the answer. Raise ApiError 404 for a model that this worker does not serve."""
        if name is None or name in self.config.names:
            return name or self.config.names[0]
        if name in self.adapters:
            return name
        served = ", ".join([*self.config.names, *(adapter.info.name for adapter in self.adapters)])
        raise ApiError(404, f"the model {quote(name)} does not exist; this endpoint serves {served}", param="model", code="model_not_found")

    async def encode(self, encode: Callable[[], Encoded], size: int, cpu: RequestCpu) -> Encoded:
        """Run an encoding of about `size` characters or tokens, in a thread if it is long. Raise ApiError 400 for a PromptError.

        Large encodings run one at a time, in turn by tenant: each briefly needs 170 times its size in memory, and there may be as many
        threads as cores. `cpu` gets the CPU time of a thread, also after the client has left.
        """
        loop = asyncio.get_running_loop()

        def run() -> Encoded:
            began = time.thread_time()
            try:
                return encode()
            finally:
                loop.call_soon_threadsafe(cpu.add_covered, time.thread_time() - began)

        try:
            if size <= INLINE_ENCODE_SIZE:
                return encode()
            if size <= LARGE:
                return await asyncio.to_thread(run)
            return await self._large_encodings.run(cpu.tenant, lambda _: asyncio.ensure_future(asyncio.to_thread(run)), _trim_heap)
        except PromptTooLong as error:
            raise too_long(too_many_tokens(error.min_tokens), error.max_tokens, error.field) from error
        except PromptError as error:
            raise invalid(str(error), param=error.field) from error

    async def encode_list(
        self, encode: Callable[[Item], Encoded], items: Sequence[Item], sizes: Sequence[int], cpu: RequestCpu
    ) -> list[Encoded]:
        """Encode items of these sizes. A large list takes a turn for each LARGE of its text, so that other tenants get theirs between."""
        total, turn, encoded, starts = sum(sizes), 0, list[Encoded](), [0]
        for place, size in enumerate(sizes):
            if turn and turn + size > LARGE:
                starts.append(place)
                turn = 0
            turn += size
        for start, end in pairwise([*starts, len(items)]):
            encoded += await self.encode(lambda part=items[start:end]: [encode(item) for item in part], total, cpu)  # type: ignore[misc]
        return encoded

    async def gzipped_prompt_format(self) -> bytes:
        """Return the prompt format under gzip: a tokenizer of 17 MB becomes 4 MB. The first request compresses it, in a thread."""
        if self._gzipped_prompt_format is None:
            self._gzipped_prompt_format = asyncio.ensure_future(asyncio.to_thread(gzip.compress, self.ready.prompt_format, 6))
        return await asyncio.shield(self._gzipped_prompt_format)

    async def compile_grammar(self, constraint: Constraint, tenant: str, report_cpu: Callable[[float], None]) -> str:
        """Return the engine's grammar for `constraint`. Raise ApiError 400 for an invalid constraint.

        `tenant`: whose turn it takes. `report_cpu` gets the CPU seconds of checking it, also after the client has left.
        """
        assert self._grammars is not None, "the model is loaded"
        self.engine.grammars_pending += 1
        try:
            return await self._grammars.compile(constraint, tenant, report_cpu)
        finally:
            self.engine.grammars_pending -= 1

    def close(self) -> None:
        """End the grammar checker's process."""
        if self._grammars is not None:
            self._grammars.close()

    def check_tokens(self, tokens: "array[int]", field: str) -> None:
        """Raise ApiError 400 unless there are token ids and all are in the vocabulary. A larger id would index past the embedding."""
        if not tokens:
            raise invalid(f"{field}: has no tokens", param=field.partition("[")[0])
        size = min(self.encoder.vocabulary_size, self.ready.vocabulary_size)
        if (largest := max(tokens)) >= size:
            raise invalid(f"{field}: token id {largest} is not in the model's vocabulary of {size}", param=field.partition("[")[0])


def _trim_heap(_: int) -> None:
    """Return the memory of a large encoding to the system."""
    asyncio.get_running_loop().run_in_executor(None, trim_heap)
