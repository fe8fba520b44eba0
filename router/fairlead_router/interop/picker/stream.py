"""Stream of one HTTP request: Envoy's messages, phase by phase, and the answers to them.

The messages depend on the body mode of Envoy's filter, which its first message names. Older versions do not name it; then it is the mode
that the inference extension requires.

| request body mode | the worker is picked | from |
| --- | --- | --- |
| FULL_DUPLEX_STREAMED | when the body is complete; headers and body wait for it | the prompt |
| BUFFERED, BUFFERED_PARTIAL | with the body, which Envoy sends after an answer to the headers | the prompt |
| STREAMED, NONE, a request without a body, other paths | with the headers | load alone |
"""

import logging

from fairlead_common.http.connection_limiter import MAX_HEADER_BYTES
from fairlead_common.protocols.paths import COMPUTED
from fairlead_router.errors import ApiError
from fairlead_router.interop.picker import messages
from fairlead_router.interop.picker.ext_proc_pb2 import (
    BUFFERED,
    BUFFERED_PARTIAL,
    FULL_DUPLEX_STREAMED,
    HeaderMutation,
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
    TrailersResponse,
)
from fairlead_router.interop.picker.gateway_request import GatewayRequest
from fairlead_router.interop.picker.picker import Picker, PickRequest, PickResult
from fairlead_router.request.client_request import FREE_PIECES, choose_request_id
from fairlead_router.request.price import MESSAGE_PRICE
from fairlead_router.tenancy.class_selection import HEADER

logger = logging.getLogger(__name__)
Answers = list[ProcessingResponse]

MARGIN = 64 * 1024
"""Bytes of a message beside headers or a body: metadata."""
_OWN_PREFIX = "x-fairlead-"


class Stream:
    """State of one stream. `answer` each message in turn, then `close`."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._request_mode = self._response_mode = FULL_DUPLEX_STREAMED
        self._headers: dict[bytes, bytes] = {}
        self._gateway_request: GatewayRequest | None = None
        self._subset: list[str] | None = None
        self._body = bytearray()
        self._pieces = 0
        """Messages in which the body came."""
        self._picked: PickResult | None = None
        self.is_refused = False
        """The last answer was a complete response, so nothing may follow."""

    async def answer(self, data: bytes) -> Answers:
        """Return the answers to one message; empty if Envoy has to send more first. Raises DecodeError."""
        was_picked = self._picked is not None
        try:
            answers = await self._answer(messages.parse(data, MAX_HEADER_BYTES + MARGIN))
            if self._picked is not None and not was_picked:
                self._picker.count(200)
            return answers
        except ApiError as error:
            self.is_refused = True
            self._picker.count(error.status)
            return [messages.build_refusal(error, self._request_id(), self._path())]

    async def _answer(self, message: ProcessingRequest) -> Answers:
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        if message.observability_mode:
            return []  # observability mode: Envoy only reports what it does
        match message.WhichOneof("request"):
            case "request_headers":
                if self._gateway_request is not None:  # replacing it would lose its reservations
                    raise ApiError(400, "The gateway sent a second request on one stream: each needs its own.", code="invalid_stream")
                self._subset = messages.read_endpoints(message.metadata_context, messages.SUBSET_NAMESPACE, messages.SUBSET)
                return await self._on_request_headers(message.request_headers)
            case "request_body":
                return await self._on_request_body(message.request_body)
            case "request_trailers":
                waiting = self._picked is None and self._request_mode == FULL_DUPLEX_STREAMED
                before = await self._pick_and_release(end_of_stream=False) if waiting else []
                return [*before, ProcessingResponse(request_trailers=TrailersResponse())]
            case "response_headers":
                return [self._on_response_headers(message)]
            case "response_body":
                return self._on_response_body(message.response_body)
            case "response_trailers":
                self.close()
                return [ProcessingResponse(response_trailers=TrailersResponse())]
            case _:
                return []  # a message of a newer Envoy

    def record_written(self) -> None:
        """Record that the answers to the last message are written, and release the body that was among them."""
        if self._gateway_request is not None and not self._body:
            self._gateway_request.release_body()

    def close(self) -> None:
        """End the request, or record that Envoy disconnected. Idempotent."""
        self._body.clear()
        self.record_written()
        if self._picked is not None:
            self._picked.session.end()
            self._client.settle()

    # The request

    async def _on_request_headers(self, head: HttpHeaders) -> Answers:
        if head.ByteSize() > MAX_HEADER_BYTES:
            message = f"The request's headers exceed {MAX_HEADER_BYTES} bytes."
            raise ApiError(431, message, code="headers_too_large")
        self._headers = dict(messages.read_headers(head.headers))
        self._picker.check_path(self._path())
        self._gateway_request = self._picker.authenticate(self._headers)
        length = self._headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._picker.max_body_bytes:
            raise self._too_large(int(length))
        body_follows = self._request_mode in (FULL_DUPLEX_STREAMED, BUFFERED, BUFFERED_PARTIAL)
        if body_follows and not head.end_of_stream and self._path() in COMPUTED:
            return (
                []
                if self._request_mode == FULL_DUPLEX_STREAMED
                else [messages.build_request_headers(messages.build_mutation(removed=self._untrusted_headers()))]
            )
        picked = await self._pick(None)
        return [messages.build_request_headers(self._request_mutation(picked), messages.build_destination(picked.endpoints))]

    async def _on_request_body(self, piece: HttpBody) -> Answers:
        self._pieces += 1
        if self._pieces > FREE_PIECES:
            self._client.account.use(MESSAGE_PRICE)
        if self._picked is not None:  # the request was already routed
            if self._request_mode == FULL_DUPLEX_STREAMED:
                return [messages.build_request_body(part) for part in messages.split_body(piece.body, piece.end_of_stream)]
            return [messages.build_request_body()]
        if len(self._body) + len(piece.body) > self._picker.max_body_bytes:
            raise self._too_large(None)
        self._client.reserve_body(len(piece.body))
        self._body += piece.body
        if self._request_mode == FULL_DUPLEX_STREAMED:
            return await self._pick_and_release(end_of_stream=True) if piece.end_of_stream else []
        body = bytes(self._body)
        self._body.clear()
        picked = await self._pick(body)
        return [messages.build_request_body(None, self._request_mutation(picked), messages.build_destination(picked.endpoints))]

    async def _pick_and_release(self, end_of_stream: bool) -> Answers:
        """Pick a worker for the buffered body, then release headers and body, with token ids if the workers accept them."""
        body = bytes(self._body)
        self._body.clear()
        picked = await self._pick(body)
        mutation, tokens = self._request_mutation(picked), picked.tokens
        if tokens is not None and len(body) + 4 * len(tokens) <= self._picker.max_body_bytes:
            token_headers = [("x-fairlead-prompt-tokens", str(len(tokens))), ("x-fairlead-prompt-format", picked.format_tag)]
            mutation.MergeFrom(messages.build_mutation(token_headers))  # the tag lets a worker whose format has changed use the text
            body = tokens.tobytes() + body
        head = messages.build_request_headers(mutation, messages.build_destination(picked.endpoints))
        return [head, *(messages.build_request_body(piece) for piece in messages.split_body(body, end_of_stream))]

    async def _pick(self, body: bytes | None) -> PickResult:
        length = self._headers.get(b"content-length", b"")
        session = self._headers.get(self._picker.session_header, b"").decode("latin-1")
        request = PickRequest(self._path(), body, int(length) if length.isdigit() else 0, session, self._subset, self._client)
        self._picked = await self._picker.pick(request)
        logger.debug("request %s: to %s", self._request_id(), self._picked.endpoints)
        return self._picked

    def _request_mutation(self, picked: PickResult) -> HeaderMutation:
        own = [(messages.DESTINATION, ",".join(picked.endpoints)), ("x-request-id", self._request_id())]
        own += [(name.decode(), value.decode()) for name, value in picked.instructions]
        return messages.build_mutation(own, self._untrusted_headers())

    def _untrusted_headers(self) -> list[str]:
        """Return headers that no worker may see: forged names of the router's own headers, and the client's API key."""
        own = [name.decode("latin-1") for name in self._headers if name.startswith(_OWN_PREFIX.encode()) or name == HEADER]
        return [*own, "authorization", "x-api-key"] if self._client.caller.tenant.name else own

    @property
    def _client(self) -> GatewayRequest:
        if self._gateway_request is None:
            message = "The gateway sent a body or trailers before the request's headers: set request_header_mode: SEND."
            raise ApiError(400, message, code="invalid_stream")
        return self._gateway_request

    def _path(self) -> str:
        return self._headers.get(b":path", b"").decode("latin-1").partition("?")[0]

    def _request_id(self) -> str:
        chosen = choose_request_id(self._headers.get(b"x-request-id", b"").decode("latin-1"))
        self._headers[b"x-request-id"] = chosen.encode()  # a generated id is kept
        return chosen

    def _too_large(self, length: int | None) -> ApiError:
        size = f"is {length} bytes: it exceeds" if length is not None else "exceeds"
        message = f"The request body {size} the limit of {self._picker.max_body_bytes} bytes (--max-body-bytes)."
        return ApiError(413, message, code="request_too_large")

    # The answer

    def _on_response_headers(self, message: ProcessingRequest) -> ProcessingResponse:
        headers = messages.read_headers(message.response_headers.headers)
        added: list[tuple[str, str]] = []
        if self._picked is not None:
            status = dict(headers).get(b":status", b"")
            served = messages.read_endpoints(message.metadata_context, messages.NAMESPACE, messages.SERVED) or [""]
            self._picked.session.start_answer(int(status) if status.isdigit() else 0, headers, served[0])
            self._client.read_head(int(status) if status.isdigit() else 0, headers)
            predicted = self._picked.session.choice.predicted
            added = [("x-fairlead-predicted-tokens", str(predicted))] if predicted is not None else []
        if message.response_headers.end_of_stream:
            self.close()
        return messages.build_response_headers(messages.build_mutation(added))

    def _on_response_body(self, piece: HttpBody) -> Answers:
        self._client.read_body(piece.body)
        if piece.end_of_stream:
            self.close()
        if self._response_mode == FULL_DUPLEX_STREAMED:
            return [messages.build_response_body(part) for part in messages.split_body(piece.body, piece.end_of_stream)]
        return [messages.build_response_body(None)]
