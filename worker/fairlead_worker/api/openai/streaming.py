"""OpenAI's responses for completions and chats: whole documents and streams of chunks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from fairlead_common.protocols.answer import Answer
from fairlead_worker.api.answers.completions import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChoice,
)
from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.generation.choice import Choice, OutputDelta
from fairlead_worker.api.generation.prepare import GenerationRequest
from fairlead_worker.api.schema import CommonRequest
from fairlead_worker.api.worker import Worker

ChunkChoice = ChatChunkChoice | CompletionChoice
Chosen = TypeVar("Chosen", ChunkChoice, CompletionChoice | ChatChoice)
Filled = TypeVar("Filled", bound=Answer)
_MARK = "\x00text\x00"
"""Placeholder for a chunk's text while the rest is encoded. Model names and request ids contain no control characters."""


class ResponseFormatter(Protocol):
    """Builds the answers of one endpoint."""

    id: str

    @property
    def chunk_type(self) -> type[Completion | ChatCompletionChunk]: ...

    @property
    def whole_type(self) -> type[Completion | ChatCompletion]: ...

    def first_chunk(self, index: int) -> ChunkChoice | None:
        """Return the first chunk of choice `index`, before any token, or None."""

    def chunks(self, index: int, delta: OutputDelta) -> Sequence[ChunkChoice]:
        """Return one chunk for each event of the delta, or one chunk for log-probabilities without an event."""

    def last_chunk(self, index: int, choice: Choice) -> ChunkChoice: ...

    def full_choice(self, index: int, choice: Choice, delta: OutputDelta) -> CompletionChoice | ChatChoice: ...

    def extra_fields(self) -> dict[str, Any]:
        """Return the fields beside the choices, of a whole response and of each choice's first chunk."""


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How the client wants its response."""

    model: str
    created: int
    formatter: ResponseFormatter
    include_usage: bool = False
    continuous_usage_stats: bool = False
    system_fingerprint: str | None = None

    @classmethod
    def of(cls, worker: Worker, request: CommonRequest, model: str, formatter: ResponseFormatter) -> "ReplyOptions":
        """Return what the request asks for."""
        given = request.stream_options
        usage = given is not None and bool(given.include_usage)
        continuous = given is not None and given.wants_continuous_usage
        return cls(model, int(time.time()), formatter, usage, continuous, worker.system_fingerprint)

    def fill(self, kind: Callable[..., Filled], choices: Sequence[Answer], **fields: Any) -> Filled:
        """Return an answer of this kind."""
        head = {"id": self.formatter.id, "created": self.created, "model": self.model, "system_fingerprint": self.system_fingerprint}
        return kind(**head, choices=choices, **fields)


@dataclass(slots=True)
class ChunkWriter:
    """Writes whole documents and streams of chunks."""

    generation_request: GenerationRequest
    options: ReplyOptions
    _out: bytearray = field(default_factory=bytearray)
    _frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """By choice: the bytes before and after the text of a chunk. Without them, each chunk of one word would build ten dictionaries."""
    _collected: dict[int, OutputDelta] = field(default_factory=dict)
    """By choice: the deltas of a whole response so far."""
    _opened: set[int] = field(default_factory=set)
    _held: list[tuple[int, OutputDelta]] = field(default_factory=list)
    """Deltas that arrived before the log-probabilities of their prompt, which are echoed first."""

    def collect(self, batch: list[tuple[int, OutputDelta]]) -> None:
        for index, delta in batch:
            self._collected.setdefault(index, OutputDelta()).add(delta)

    def document(self) -> Answer:
        gathered, generation_request, formatter = self._collected, self.generation_request, self.options.formatter
        best = [(place, generation_request.choices[i], gathered[i]) for place, i in enumerate(generation_request.select_best())]
        choices = [self._with_ids(formatter.full_choice(place, choice, delta), delta.tokens) for place, choice, delta in best]
        return self.options.fill(formatter.whole_type, choices, usage=generation_request.usage(), **formatter.extra_fields())

    def begin(self) -> bytes:
        for index in range(len(self.generation_request.choices)):
            if not self.generation_request.awaits_prompt_logprobs(index):
                self._open_choice(index)
        return self._drain()

    def add(self, batch: list[tuple[int, OutputDelta]]) -> bytes:
        pending, self._held = self._held + batch, []
        for index, delta in pending:
            if self.generation_request.awaits_prompt_logprobs(index):
                self._held.append((index, delta))
            else:
                self._write_delta(index, delta)
        return self._drain()

    def end(self, comment: bytes) -> bytes:
        if self.options.include_usage:
            self._write_event(self.options.fill(self.options.formatter.chunk_type, [], usage=self.generation_request.usage()))
        return self._drain() + comment + b"data: [DONE]\n\n"

    def fail(self, error: ApiError) -> bytes:
        return error.event()

    def _open_choice(self, index: int) -> None:
        first = self.options.formatter.first_chunk(index)
        if first is not None:
            beside = self.options.formatter.extra_fields()
            if self.options.continuous_usage_stats:
                beside["usage"] = self.generation_request.usage(generated=False)
            self._write_chunk(self._with_ids(first, []), **beside)
        self._opened.add(index)

    def _write_delta(self, index: int, delta: OutputDelta) -> None:
        choice = self.generation_request.choices[index]
        if index not in self._opened:
            self._open_choice(index)
        plain = delta.plain_text
        ids = self.generation_request.output_options.return_token_ids and bool(delta.tokens)
        if delta.logprobs or plain is None or ids or (plain and self.options.continuous_usage_stats):
            for place, chunk in enumerate(self.options.formatter.chunks(index, delta)):
                self._write_chunk(self._with_ids(chunk, [] if place else delta.tokens))
        elif plain:
            head, tail = self._frames.get(index) or self._build_frame(index)
            self._out += head
            self._out += msgspec.json.encode(plain)
            self._out += tail
        # The choices have processed the whole batch, so only the last delta of a choice writes its finish.
        if delta.is_last:
            self._write_chunk(self._with_ids(self.options.formatter.last_chunk(index, choice), []))

    def _build_frame(self, index: int) -> tuple[bytes, bytes]:
        before, self._out = self._out, bytearray()
        for chunk in self.options.formatter.chunks(index, OutputDelta(_MARK)):
            self._write_chunk(chunk)
        head, _, tail = bytes(self._out).partition(msgspec.json.encode(_MARK))
        self._out = before
        self._frames[index] = head, tail
        return head, tail

    def _with_ids(self, choice: Chosen, tokens: list[int]) -> Chosen:
        """Return a choice with vLLM's `token_ids`, if the request has `return_token_ids`."""
        if self.generation_request.output_options.return_token_ids:
            choice.token_ids = tokens
        return choice

    def _write_chunk(self, choice: ChunkChoice, **beside: Any) -> None:
        if "usage" not in beside and (self.options.include_usage or self.options.continuous_usage_stats):
            beside["usage"] = self.generation_request.usage() if self.options.continuous_usage_stats else None
        self._write_event(self.options.fill(self.options.formatter.chunk_type, [choice], **beside))

    def _write_event(self, event: Answer) -> None:
        self._out += b"data: "
        self._out += msgspec.json.encode(event)
        self._out += b"\n\n"

    def _drain(self) -> bytes:
        data = bytes(self._out)
        self._out.clear()
        return data
