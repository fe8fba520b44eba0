"""Answers as OpenAI has them for completions and chats: documents, and streams of chunks."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from fairlead_worker.api import replies as answering
from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.generation.choice import Choice, Piece
from fairlead_worker.api.generation.prepare import Prepared
from fairlead_worker.api.http import Exchange
from fairlead_worker.api.worker import Worker

_MARK = "\x00text\x00"
"""Stands for the text of a chunk while what surrounds it is encoded: control characters are in no model's name and no request id."""


class Shape(Protocol):
    """One endpoint's JSON."""

    id: str
    chunk_object: str
    whole_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """What choice `index` of a stream begins with, before any token."""

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """A chunk for each of the piece's events; one more where it has log-probabilities only."""

    def ending(self, index: int, choice: Choice) -> dict[str, Any]: ...

    def whole(self, index: int, choice: Choice, piece: Piece) -> dict[str, Any]: ...

    def beside(self) -> dict[str, Any]:
        """What an answer has beside its choices: a whole one, and a stream's first chunk of each choice."""


@dataclass(frozen=True, slots=True)
class Reply:
    """How the client wants its answer."""

    model: str
    created: int
    shape: Shape
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    usage_comment: bool = False
    """The router wants to know, whether the client does or not."""

    def document(self, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.shape.id, "object": object, "created": self.created, "model": self.model, "choices": choices}


async def answer(exchange: Exchange, worker: Worker, prepared: Prepared, reply: Reply) -> None:
    """Generate and send, in OpenAI's documents and chunks."""
    writer = ChunkWriter(prepared, reply)
    await answering.answer(exchange, worker, prepared, writer, stream=reply.stream, usage_comment=reply.usage_comment)


def shown_ids(prepared: Prepared, piece: Piece) -> dict[str, Any]:
    """vLLM's `return_token_ids`: beside the text, the tokens that it comes from."""
    return {"token_ids": piece.tokens} if prepared.show.token_ids else {}


@dataclass(slots=True)
class ChunkWriter:
    """Whole documents, and streams of chunks."""

    prepared: Prepared
    reply: Reply
    _out: bytearray = field(default_factory=bytearray)
    _frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """Of each choice: what stands before and after the text of a chunk. A chunk is otherwise ten dictionaries' work for one word."""
    _gathered: dict[int, Piece] = field(default_factory=dict)
    """Of each choice of a whole answer: what there is."""
    _opened: set[int] = field(default_factory=set)
    _held: list[tuple[int, Piece]] = field(default_factory=list)
    """Pieces that came before the log-probabilities of their prompt, which are echoed before them."""

    def keep(self, batch: list[tuple[int, Piece]]) -> None:
        for index, piece in batch:
            self._gathered.setdefault(index, Piece()).add(piece)

    def whole(self) -> dict[str, Any]:
        gathered, prepared, shape = self._gathered, self.prepared, self.reply.shape
        best = [(place, prepared.choices[i], gathered[i]) for place, i in enumerate(prepared.best())]
        choices = [shape.whole(place, choice, piece) | shown_ids(prepared, piece) for place, choice, piece in best]
        return self.reply.document(shape.whole_object, choices) | {"usage": prepared.usage()} | shape.beside()

    def begin(self) -> bytes:
        for index in range(len(self.prepared.choices)):
            if not self.prepared.awaits_scores(index):
                self._opening(index)
        return self._taken()

    def add(self, batch: list[tuple[int, Piece]]) -> bytes:
        pending, self._held = self._held + batch, []
        for index, piece in pending:
            if self.prepared.awaits_scores(index):
                self._held.append((index, piece))
            else:
                self._piece(index, piece)
        return self._taken()

    def end(self, comment: bytes) -> bytes:
        if self.reply.include_usage:
            self._event(self.reply.document(self.reply.shape.chunk_object, []) | {"usage": self.prepared.usage()})
        return self._taken() + comment + b"data: [DONE]\n\n"

    def fail(self, error: ApiError) -> bytes:
        return error.event()

    def _opening(self, index: int) -> None:
        opening = self.reply.shape.opening(index)
        if opening is not None:
            self._chunk(opening, self.reply.shape.beside())
        self._opened.add(index)

    def _piece(self, index: int, piece: Piece) -> None:
        choice = self.prepared.choices[index]
        if index not in self._opened:
            self._opening(index)
        plain = piece.plain
        ids = self.prepared.show.token_ids and bool(piece.tokens)
        if piece.logprobs or plain is None or ids or (plain and self.reply.continuous_usage):
            for place, delta in enumerate(self.reply.shape.deltas(index, piece)):
                self._chunk(delta if place else delta | shown_ids(self.prepared, piece))
        elif plain:
            head, tail = self._frames.get(index) or self._frame(index)
            self._out += head
            self._out += msgspec.json.encode(plain)
            self._out += tail
        # Pieces of a batch were all taken in already: the finish belongs to the last of them.
        if piece.last:
            self._chunk(self.reply.shape.ending(index, choice))

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        before, self._out = self._out, bytearray()
        for delta in self.reply.shape.deltas(index, Piece(_MARK)):
            self._chunk(delta)
        head, _, tail = bytes(self._out).partition(msgspec.json.encode(_MARK))
        self._out = before
        self._frames[index] = head, tail
        return head, tail

    def _chunk(self, choice: dict[str, Any], beside: dict[str, Any] | None = None) -> None:
        document = self.reply.document(self.reply.shape.chunk_object, [choice]) | (beside or {})
        if self.reply.continuous_usage:
            document["usage"] = self.prepared.usage()
        elif self.reply.include_usage:
            document["usage"] = None
        self._event(document)

    def _event(self, document: dict[str, Any]) -> None:
        self._out += b"data: "
        self._out += msgspec.json.encode(document)
        self._out += b"\n\n"

    def _taken(self) -> bytes:
        data = bytes(self._out)
        self._out.clear()
        return data
