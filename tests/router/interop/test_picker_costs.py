"""What a gateway's messages may cost: bounded before they are built, and paid by their tenant."""

import logging
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tests.router.gateway import PROCESS, Gateway, gateway, header_map, metadata
from tests.router.harness import Fleet, eventually
from tests.router.interop.picker import PATH, picking
from tests.router.tenancy.test_access import ANNA, guarded

from fairlead_router.errors import ApiError
from fairlead_router.interop.picker import messages
from fairlead_router.interop.picker.ext_proc_pb2 import HttpBody, HttpHeaders, ProcessingRequest, ProtocolConfiguration
from fairlead_router.request.client_request import FREE_PIECES
from fairlead_router.request.price import MESSAGE_PRICE

LIMIT = 128 * 1024


def field(number: int, content: bytes) -> bytes:
    """Return a field of a message in protobuf's encoding."""
    length, size = bytearray(), len(content)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


MANY = 2_000_000
EXPENSIVE = {
    "headers": field(2, field(1, field(1, b"") * MANY)),
    "trailers": field(6, field(1, field(1, b"") * MANY)),
    "repeated headers": field(2, b"") * MANY,
    "repeated bodies": field(3, b"") * MANY,
    "pieces of a body": field(3, field(1, b"") * MANY),
    "unknown fields": field(15, b"") * MANY,
    "headers after a body": field(3, field(1, b"x")) + field(2, field(1, field(1, b"") * MANY)),
    "headers after a large body": field(3, field(1, bytes(2 * LIMIT))) + field(2, field(1, field(1, b"") * MANY)),
    "a body that ends elsewhere": b"\x1a\xff\xff\xff\x7f\x0a\xff\xff\xff\x7f"[:6] + field(2, b"") * MANY,
}


@pytest.mark.parametrize("kind", EXPENSIVE)
def test_an_expensive_message_is_refused_before_it_is_built(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "ProcessingRequest", None)
    with pytest.raises(ApiError, match="beside a body") as refused:
        messages.parse(EXPENSIVE[kind], LIMIT)
    assert refused.value.status == 431


@given(st.integers(0, 3 * LIMIT), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_a_message_with_a_body_is_read_whatever_is_beside_it(size: int, answer: bool, end: bool, config: bool, context: bool) -> None:
    message = ProcessingRequest(
        observability_mode=end,
        protocol_config=ProtocolConfiguration(request_body_mode=2) if config else None,
        metadata_context=metadata("envoy.lb.subset_hint", endpoints=["10.0.0.1:80"] * 100) if context else None,
        **{"response_body" if answer else "request_body": HttpBody(body=bytes(size), end_of_stream=end)},
    )
    assert messages.parse(message.SerializeToString(), LIMIT) == message


@given(st.binary(max_size=200))
def test_any_bytes_are_read_as_a_message_or_refused(data: bytes) -> None:
    try:
        expected = ProcessingRequest.FromString(data)
    except DecodeError:
        with pytest.raises((DecodeError, ApiError)):
            messages.parse(data, 10)
    else:
        assert messages.parse(data, 200) == expected


async def send(asking: Gateway, data: bytes) -> list[bytes]:
    """Send one message of any bytes and return the answers."""
    call = asking.channel.stream_stream(PROCESS)()
    await call.write(data)
    await call.done_writing()
    return [answer async for answer in call]


async def test_a_gateway_gets_431_for_an_expensive_message_and_large_bodies_pass(fleet: Fleet) -> None:
    async with picking(fleet, await fleet.worker()) as (_, asking):
        (answer,) = await send(asking, EXPENSIVE["headers"])
        refusal = messages.ProcessingResponse.FromString(answer).immediate_response
        assert refusal.status.code == 431 and b"beside a body" in refusal.body
        exchange = asking.exchange()
        await exchange.headers(PATH)
        await exchange.body(b'{"model": "stand-in", "prompt": "hello"' + b" " * 4_000_000 + b"}")
        await exchange.picked()


async def test_bytes_that_are_no_message_are_refused_without_a_traceback(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with picking(fleet, await fleet.worker()) as (_, asking):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await send(asking, b"\xff" * 100)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "ProcessingRequest" in (refused.value.details() or "")
        valid = ProcessingRequest(request_headers=HttpHeaders(headers=header_map(_path="/v1/models", _method="GET"), end_of_stream=True))
        assert len(await send(asking, valid.SerializeToString())) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING or "ProcessingRequest" in record.message]


async def test_a_body_in_many_messages_is_paid_for(fleet: Fleet, tmp_path: Path) -> None:
    tenants = {"anna": {"tokensPerMinute": 6, "burstTokens": 1_000_000}, "boris": {}}
    router, _ = await guarded(fleet, tmp_path, tenants, picker_port=0, picker_tls="off")
    assert router.server.router.picker is not None
    async with gateway(router.server.router.picker.port) as asking:
        exchange = asking.exchange()
        await exchange.headers(PATH, authorization=f"Bearer {ANNA}")
        await exchange.body(*[b""] * FREE_PIECES, b" ", end=False)
        bodies = router.server.router.handler.body_budget
        await eventually(lambda: bodies.total == 1, "it is read")
        (account,) = (one for name, one in router.server.router.handler._accounts._accounts.items() if name == "anna")
        before = account.level
        await exchange.body(*[b""] * 1000, b" ", end=False)
        await eventually(lambda: bodies.total == 2, "it is read")
        assert before - account.level > 990 * MESSAGE_PRICE, "empty messages too; six tokens a minute come back"
        exchange.call.cancel()
