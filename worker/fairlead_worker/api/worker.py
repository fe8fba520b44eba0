"""What the endpoints share: the engine, the prompt encoder, and whether this worker takes requests."""

import asyncio
import gzip
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec

from fairlead_common.memory import LARGE, give_back
from fairlead_common.prompts.encoder import PromptEncoder, PromptError, PromptFormat, PromptTooLong, digest
from fairlead_common.prompts.token_cache import TokenCache
from fairlead_common.truncate import quoted
from fairlead_index.hashing import prompt_root
from fairlead_worker.api.engine.adapters import Adapters
from fairlead_worker.api.engine.client import EngineClient
from fairlead_worker.api.errors import ApiError, busy, invalid, too_long, unavailable
from fairlead_worker.api.grammar_checker import GrammarChecker
from fairlead_worker.api.output_parsers import OutputParsers
from fairlead_worker.config import WorkerConfig
from fairlead_worker.grammar.constraint import Constraint
from fairlead_worker.messages import Ready
from fairlead_worker.parsing.families import select_parsers

if TYPE_CHECKING:
    from fairlead_worker.api.metrics.worker_metrics import Metrics

logger = logging.getLogger(__name__)

INLINE_ENCODE_SIZE = 4096
"""Characters from which tokenizing leaves the event loop: below, a thread costs more than the work."""

Encoded = TypeVar("Encoded")

MAX_ROOTS = 4096
"""Of clients' salts that are remembered."""


class Worker:
    """One model replica as the API sees it."""

    def __init__(self, config: WorkerConfig, engine: EngineClient, metrics: "Metrics", address: str) -> None:
        self.config = config
        self.engine = engine
        self.metrics = metrics
        self.address = address
        self.draining = False
        self.warming = False
        """It computes what its peers' clients share, before it takes requests."""
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.base_model_roots: OrderedDict[int, None] = OrderedDict()
        """Root numbers of requests lately that the bare model answered. What is cached under any other is not for a peer to compute."""
        self.started = int(time.time())
        self.incarnation: Callable[[], str] = lambda: ""
        """What the index knows this worker by: routers use its records only while this is what it says itself."""
        self.adapters = Adapters(config, engine)
        self.prompt_etag = ""
        """The ETag of the prompt format, in quotes."""
        self._gzipped_prompt_format: asyncio.Future[bytes] | None = None
        self._large_encoding = asyncio.Lock()
        self.token_cache = TokenCache(config.token_cache_bytes)
        self._grammars: GrammarChecker | None = None
        self._model: tuple[Ready, PromptEncoder, OutputParsers] | None = None

    def set_ready(self, ready: Ready) -> None:
        """The engine is ready: from now on prompts can be encoded."""
        format = msgspec.json.decode(ready.prompt_format, type=PromptFormat)
        self._grammars = GrammarChecker(self.config, format.tokenizer_json, ready.vocabulary_size, ready.eos_token_ids)
        encoder = PromptEncoder(format, self.token_cache)
        reader, why = select_parsers(
            self.config.tool_call_parser, self.config.reasoning_parser, (format.chat_template, format.tool_template)
        )
        logger.info("parsers of answers: %s", why)
        self._model = ready, encoder, OutputParsers(reader, encoder)
        self.adapters.set_initial(ready.adapters)
        self.prompt_etag = f'"{digest(ready.prompt_format.decode())}"'

    def base_model_root(self, salt: str) -> int:
        """The root number of a prompt for the bare model: no adapter has a part in its KV."""
        root = prompt_root(self.encoder.format, salt=salt)
        self.base_model_roots[root] = None
        self.base_model_roots.move_to_end(root)
        if len(self.base_model_roots) > MAX_ROOTS:
            self.base_model_roots.popitem(last=False)
        return root

    @property
    def serving(self) -> bool:
        return self._model is not None and self.engine.serving and not self.draining and not self.warming

    @property
    def healthy(self) -> bool:
        """The engine lives, as far as anybody knows."""
        if self.engine.state.phase == "failed" or self.engine.seconds_without_progress() >= self.config.load_timeout:
            return False
        return self.engine.seconds_since_message() < self.config.engine_timeout

    def check_serving(self) -> None:
        """Raises the 503 that sends the router to another pod, unless this worker takes requests."""
        if self.draining:
            raise unavailable("this worker is shutting down")
        state = self.engine.state
        if state.phase == "failed":
            raise unavailable(f"the engine has ended: {state.reason}")
        if self.warming:
            raise unavailable("this worker is being warmed and takes no requests yet")
        if not self.serving:
            raise unavailable(f"the model is not loaded yet: {state.step}, {state.percent} %")

    def check_queue_limit(self, sequences: int) -> None:
        """Raises the 429 that sends the router to another pod where `sequences` more would be too many that wait. One request always may:
        however many sequences it has, it could otherwise never be served."""
        limit, waiting = self.config.max_waiting_requests, self.engine.num_waiting
        if limit and waiting and waiting + sequences > limit:
            message = f"{waiting} sequences wait for their first token here, and at most {limit} may (--max-waiting-requests)"
            raise busy(message, max(1, round(self.engine.estimate_wait())))

    @contextmanager
    def track_request(self) -> Iterator[None]:
        """A request that a drain waits for."""
        self.in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()

    @property
    def ready(self) -> Ready:
        return self._require_model()[0]

    @property
    def encoder(self) -> PromptEncoder:
        return self._require_model()[1]

    @property
    def output_parsers(self) -> OutputParsers:
        return self._require_model()[2]

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output: what the model was made for, and what the KV pages hold."""
        ready = self.ready
        return min(ready.max_model_len, ready.pages * ready.page_size)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises 404 for a model that is not served here."""
        if name is None or name in self.config.names:
            return name or self.config.names[0]
        if name in self.adapters:
            return name
        served = ", ".join([*self.config.names, *(adapter.info.name for adapter in self.adapters)])
        raise ApiError(
            404, f"the model {quoted(name)} does not exist; this endpoint serves {served}", param="model", code="model_not_found"
        )

    async def encode(self, encode: Callable[[], Encoded], size: int) -> Encoded:
        """Run an encoding of about `size` characters (or tokens), in a thread where it is long; a PromptError becomes a 400.

        Large ones go one after the other: each takes 170 times its size for a moment, and there may be as many threads as cores.
        """
        try:
            if size <= INLINE_ENCODE_SIZE:
                return encode()
            if size <= LARGE:
                return await asyncio.to_thread(encode)
            await self._large_encoding.acquire()
            encoding = asyncio.ensure_future(asyncio.to_thread(encode))
            encoding.add_done_callback(self._release_large_encoding)
            return await asyncio.shield(encoding)  # the client may go, and the thread works on: so long it is nobody else's turn
        except PromptTooLong as error:
            message = f"your prompt has at least {error.least} tokens; shorten it"
            raise too_long(message, self.max_model_len, error.field) from error
        except PromptError as error:
            raise invalid(str(error), param=error.field) from error

    def _release_large_encoding(self, encoding: "asyncio.Future[Encoded]") -> None:
        """A large prompt: what that needed is given back, and its turn."""
        if not encoding.cancelled():
            encoding.exception()  # told to whoever still waits for it
        asyncio.get_running_loop().run_in_executor(None, give_back)
        self._large_encoding.release()

    async def gzipped_prompt_format(self) -> bytes:
        """The prompt format under gzip: a tokenizer of 17 MB becomes 4. Packed once, in a thread, by the first who asks."""
        if self._gzipped_prompt_format is None:
            self._gzipped_prompt_format = asyncio.ensure_future(asyncio.to_thread(gzip.compress, self.ready.prompt_format, 6))
        return await asyncio.shield(self._gzipped_prompt_format)

    async def compile_grammar(self, constraint: Constraint | None) -> str:
        """What the engine needs to keep an answer in its form; empty: it may be anything. ApiError 400 for one that does not work."""
        if constraint is None:
            return ""
        if self._grammars is None:
            raise unavailable("the model is not loaded yet")
        self.engine.grammars_pending += 1
        try:
            return await self._grammars.compile(constraint)
        finally:
            self.engine.grammars_pending -= 1

    def close(self) -> None:
        """Ends what was started beside the engine."""
        if self._grammars is not None:
            self._grammars.close()

    def check_tokens(self, tokens: "array[int]", field: str) -> None:
        """Token ids from outside: not none, and all in the vocabulary (a stray one would index past the embedding)."""
        if not tokens:
            raise invalid(f"{field}: has no tokens", param=field.partition("[")[0])
        size = min(self.encoder.vocabulary_size, self.ready.vocabulary_size)
        if (largest := max(tokens)) >= size:
            raise invalid(f"{field}: token id {largest} is not in the model's vocabulary of {size}", param=field.partition("[")[0])

    def _require_model(self) -> tuple[Ready, PromptEncoder, OutputParsers]:
        if self._model is None:
            raise unavailable("the model is not loaded yet")
        return self._model
