"""Answers: one JSON document, or server-sent events. Nothing is sent before the first token is there."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from fairlead_worker.api.choice import Choice, Piece
from fairlead_worker.api.generation import Prepared
from fairlead_worker.api.http import ClientGone, Exchange, as_api_error
from fairlead_worker.api.run import Run
from fairlead_worker.api.worker import Worker

logger = logging.getLogger(__name__)

CACHED_HEADER, USAGE_HEADER = "x-fairlead-cached-tokens", "x-fairlead-usage"
_MARK = "\x00text\x00"
"""Stands for the text of a chunk while what surrounds it is encoded: control characters are in no model's name and no request id."""


class Shape(Protocol):
    """One endpoint's JSON."""

    id: str
    chunk_object: str
    whole_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """What choice `index` of a stream begins with, before any token."""

    def delta(self, index: int, piece: Piece) -> dict[str, Any]: ...

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
    """Generate and send. A client that goes takes its sequences with it."""
    run = Run(worker, prepared)

    async def work() -> None:
        worker.make_way(len(prepared.submissions))
        async with worker.engine.generate(prepared.submissions) as generation:
            pieces = run.pieces(generation)
            if reply.stream:
                await _Stream(exchange, prepared, reply).send(pieces)
            else:
                await _whole(exchange, prepared, reply, pieces)

    try:
        await exchange.while_connected(work())
    except ClientGone:
        run.gone()
        raise
    finally:
        run.log(exchange.request_id)


async def _whole(exchange: Exchange, prepared: Prepared, reply: Reply, pieces: AsyncIterator[list[tuple[int, Piece]]]) -> None:
    gathered = [Piece() for _ in prepared.choices]
    async for batch in pieces:
        for index, piece in batch:
            gathered[index].add(piece)

    def shape() -> list[dict[str, Any]]:
        return [
            reply.shape.whole(place, prepared.choices[i], gathered[i]) | shown_ids(prepared, gathered[i])
            for place, i in enumerate(prepared.best())
        ]

    # Twenty entries for each token of a long prompt take seconds: not in the way of everybody's streams.
    choices = await asyncio.to_thread(shape) if prepared.scored else shape()
    usage = prepared.usage()
    document = reply.document(reply.shape.whole_object, choices) | {"usage": usage} | reply.shape.beside()
    cached = str(usage["prompt_tokens_details"]["cached_tokens"])
    await exchange.json(document, {CACHED_HEADER: cached, USAGE_HEADER: _spent(prepared)})


def shown_ids(prepared: Prepared, piece: Piece) -> dict[str, Any]:
    """vLLM's `return_token_ids`: beside the text, the tokens that it comes from."""
    return {"token_ids": piece.tokens} if prepared.show.token_ids else {}


def _spent(prepared: Prepared) -> str:
    """Prompt tokens and generated ones."""
    usage = prepared.usage()
    return f"{usage['prompt_tokens']} {usage['completion_tokens']}"


@dataclass(slots=True)
class _Stream:
    exchange: Exchange
    prepared: Prepared
    reply: Reply
    _out: bytearray = field(default_factory=bytearray)
    _frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """Of each choice: what stands before and after the text of a chunk. A chunk is otherwise ten dictionaries' work for one word."""
    _opened: set[int] = field(default_factory=set)
    _held: list[tuple[int, Piece]] = field(default_factory=list)
    """Pieces that came before the log-probabilities of their prompt, which are echoed before them."""

    async def send(self, pieces: AsyncIterator[list[tuple[int, Piece]]]) -> None:
        try:
            async for batch in pieces:
                if not self.exchange.started:
                    await self._open()
                pending, self._held = self._held + batch, []
                for index, piece in pending:
                    if self.prepared.awaits_scores(index):
                        self._held.append((index, piece))
                    else:
                        self._piece(index, piece)
                if self._out:
                    await self._flush()
        except Exception as error:
            if not self.exchange.started:
                raise
            shown = as_api_error(error)
            logger.warning("request %s ended in mid-stream: %s", self.exchange.request_id, error)
            await self.exchange.write(b"data: " + shown.body() + b"\n\n", more=False)
            return
        if self.reply.include_usage:
            self._event(self.reply.document(self.reply.shape.chunk_object, []) | {"usage": self.prepared.usage()})
        if self.reply.usage_comment:
            self._out += f": usage {_spent(self.prepared)}\n\n".encode()
        self._out += b"data: [DONE]\n\n"
        await self.exchange.write(bytes(self._out), more=False)

    async def _open(self) -> None:
        cached = self.prepared.usage()["prompt_tokens_details"]["cached_tokens"]
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", CACHED_HEADER: str(cached)}
        await self.exchange.start(200, headers)
        for index in range(len(self.prepared.choices)):
            if not self.prepared.awaits_scores(index):
                self._opening(index)

    def _opening(self, index: int) -> None:
        opening = self.reply.shape.opening(index)
        if opening is not None:
            self._chunk(opening, self.reply.shape.beside())
        self._opened.add(index)

    def _piece(self, index: int, piece: Piece) -> None:
        choice = self.prepared.choices[index]
        if index not in self._opened:
            self._opening(index)
        if piece.logprobs or (piece.text and self.reply.continuous_usage) or (piece.tokens and self.prepared.show.token_ids):
            self._chunk(self.reply.shape.delta(index, piece) | shown_ids(self.prepared, piece))
        elif piece.text:
            head, tail = self._frames.get(index) or self._frame(index)
            self._out += head
            self._out += msgspec.json.encode(piece.text)
            self._out += tail
        # Pieces of a batch were all taken in already: the finish belongs to the last of them.
        if piece.last:
            self._chunk(self.reply.shape.ending(index, choice))

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        before, self._out = self._out, bytearray()
        self._chunk(self.reply.shape.delta(index, Piece(_MARK)))
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

    async def _flush(self) -> None:
        data = bytes(self._out)
        self._out.clear()
        await self.exchange.write(data)
