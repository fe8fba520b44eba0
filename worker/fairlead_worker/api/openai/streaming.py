"""OpenAI's responses for completions and chats: whole documents and streams of chunks."""

import time
from collections.abc import Callable, Sequence
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
_MARK = "\x00text\x00"
"""Placeholder for a chunk's text while the rest is encoded. Model names and request ids contain no control characters."""


class ResponseFormatter(Protocol):
    """Builds the answers of one endpoint."""

    id: str

    @property
    def chunk_type(self) -> Callable[..., Completion | ChatCompletionChunk]: ...

    @property
    def whole_type(self) -> Callable[..., Completion | ChatCompletion]: ...

    def first_chunk(self, index: int) -> ChunkChoice | None:
        """Return the first chunk of choice `index`, before any token, or None."""

    def chunks(self, index: int, delta: OutputDelta) -> Sequence[ChunkChoice]:
        """Return one chunk for each event of the delta, or one chunk for log-probabilities without an event."""

    def last_chunk(self, index: int, choice: Choice) -> ChunkChoice: ...

    def full_choice(self, index: int, choice: Choice, delta: OutputDelta) -> CompletionChoice | ChatChoice: ...

    def extra_fields(self) -> dict[str, Any]:
        """Return the fields beside the choices, of a whole response and of each choice's first chunk."""


class ChunkWriter:
    """Writes whole documents and streams of chunks."""

    def __init__(
        self, worker: Worker, request: CommonRequest, model: str, formatter: ResponseFormatter, generation_request: GenerationRequest
    ) -> None:
        options = request.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._continuous_usage = options is not None and options.wants_continuous_usage
        self._head = {
            "id": formatter.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": worker.system_fingerprint,
        }
        self._formatter, self._generation_request = formatter, generation_request
        self._out = bytearray()
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """By choice: the bytes before and after the text of a chunk. Without them, each chunk of one word would build ten dictionaries."""
        self._collected: dict[int, OutputDelta] = {}
        """By choice: the deltas of a whole response so far."""
        self._opened: set[int] = set()
        self._held: list[tuple[int, OutputDelta]] = []
        """Deltas that arrived before the log-probabilities of their prompt, which are echoed first."""

    def collect(self, batch: list[tuple[int, OutputDelta]]) -> None:
        for index, delta in batch:
            self._collected.setdefault(index, OutputDelta()).add(delta)

    def document(self) -> Answer:
        gathered, generation_request, formatter = self._collected, self._generation_request, self._formatter
        best = [(place, generation_request.choices[i], gathered[i]) for place, i in enumerate(generation_request.select_best())]
        choices = [self._with_ids(formatter.full_choice(place, choice, delta), delta.tokens) for place, choice, delta in best]
        return formatter.whole_type(**self._head, choices=choices, usage=generation_request.usage(), **formatter.extra_fields())

    def begin(self) -> bytes:
        for index in range(len(self._generation_request.choices)):
            if not self._generation_request.awaits_prompt_logprobs(index):
                self._open_choice(index)
        return self._drain()

    def add(self, batch: list[tuple[int, OutputDelta]]) -> bytes:
        pending, self._held = self._held + batch, []
        for index, delta in pending:
            if self._generation_request.awaits_prompt_logprobs(index):
                self._held.append((index, delta))
            else:
                self._write_delta(index, delta)
        return self._drain()

    def end(self, comment: bytes) -> bytes:
        if self._include_usage:
            self._write_event(self._formatter.chunk_type(**self._head, choices=[], usage=self._generation_request.usage()))
        return self._drain() + comment + b"data: [DONE]\n\n"

    def fail(self, error: ApiError) -> bytes:
        return error.event()

    def _open_choice(self, index: int) -> None:
        first = self._formatter.first_chunk(index)
        if first is not None:
            beside = self._formatter.extra_fields()
            if self._continuous_usage:
                beside["usage"] = self._generation_request.usage(generated=False)
            self._write_chunk(self._with_ids(first, []), **beside)
        self._opened.add(index)

    def _write_delta(self, index: int, delta: OutputDelta) -> None:
        choice = self._generation_request.choices[index]
        if index not in self._opened:
            self._open_choice(index)
        plain = delta.plain_text
        ids = self._generation_request.options.return_token_ids and bool(delta.tokens)
        if delta.logprobs or plain is None or ids or (plain and self._continuous_usage):
            for place, chunk in enumerate(self._formatter.chunks(index, delta)):
                self._write_chunk(self._with_ids(chunk, [] if place else delta.tokens))
        elif plain:
            head, tail = self._frames.get(index) or self._build_frame(index)
            self._out += head
            self._out += msgspec.json.encode(plain)
            self._out += tail
        # The choices have processed the whole batch, so only the last delta of a choice writes its finish.
        if delta.is_last:
            self._write_chunk(self._with_ids(self._formatter.last_chunk(index, choice), []))

    def _build_frame(self, index: int) -> tuple[bytes, bytes]:
        before, self._out = self._out, bytearray()
        for chunk in self._formatter.chunks(index, OutputDelta(_MARK)):
            self._write_chunk(chunk)
        head, _, tail = bytes(self._out).partition(msgspec.json.encode(_MARK))
        self._out = before
        self._frames[index] = head, tail
        return head, tail

    def _with_ids(self, choice: Chosen, tokens: list[int]) -> Chosen:
        """Return a choice with vLLM's `token_ids`, if the request has `return_token_ids`."""
        if self._generation_request.options.return_token_ids:
            choice.token_ids = tokens
        return choice

    def _write_chunk(self, choice: ChunkChoice, **beside: Any) -> None:
        if "usage" not in beside and (self._include_usage or self._continuous_usage):
            beside["usage"] = self._generation_request.usage() if self._continuous_usage else None
        self._write_event(self._formatter.chunk_type(**self._head, choices=[choice], **beside))

    def _write_event(self, event: Answer) -> None:
        self._out += b"data: "
        self._out += msgspec.json.encode(event)
        self._out += b"\n\n"

    def _drain(self) -> bytes:
        data = bytes(self._out)
        self._out.clear()
        return data
