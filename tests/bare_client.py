"""Clients on a bare socket that send what no HTTP library would: the worker and the router get the same tests."""

import asyncio
import contextlib
import json

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
WHOLE = HEAD + b"content-length: 2\r\n\r\n{}"
PATIENCE_SECONDS = 60
"""Time for an immediate answer on a machine that is busy with other tests."""
SLOW = [
    (b"", (0, "")),
    (HEAD + b"x-slow: ", (408, "request_timeout")),
    (HEAD + b"content-length: 100\r\n\r\n{", (408, "request_timeout")),
    (HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{", (408, "request_timeout")),
]
"""Clients that begin a request and stop, and the answer (see `send_raw`)."""

CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
UNBOUNDED = {
    "one long trailer": CHUNKED + b"2\r\n{}\r\n0\r\nx: " + b"y" * 400_000,
    "many trailers": CHUNKED + b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 1000 + b"\r\n",
    "chunks of one byte": CHUNKED + b"1\r\n \r\n" * 40_000,
    "a chunk extension": CHUNKED + b"2;" + b"y" * 400_000,
}
"""Bytes that are neither head nor body: refused with 431, as headers are."""

INNER = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
UPGRADES = {
    "upgrade with a body": HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: %d\r\n\r\n" % len(INNER) + INNER,
    "connect with a body": b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(INNER) + INNER,
}
"""The parser ends such a request after its head: its body must not become the next request."""


async def send_raw(port: int, sent: bytes) -> tuple[int, str]:
    """Return status, and error code or body, of what a connection gets before it ends. Status 0: closed without an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    text = b""
    with contextlib.suppress(ConnectionError):
        text = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    writer.close()
    if not text:
        return 0, ""
    head, _, body = text.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)["error"]["code"] if b"application/json" in head else body.decode()


async def send_headers_forever(port: int) -> bytes:
    """Return the status line that a client gets which sends headers without end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(HEAD)
            while not writer.is_closing():
                writer.write(b"x: y\r\n")
                await writer.drain()
                await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    line = await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)
    dripping.cancel()
    writer.close()
    return line
