"""Requests that aiohttp cannot parse: a short answer, one line in the log, and nothing of the request in either."""

import asyncio
import logging
import socket

import pytest
from aiohttp import web

from fairlead_common.http.aiohttp_runner import Runner

LINE = "GET /?api_key=hidden HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    ("request_head", "status", "code"),
    [
        (f"GET /?api_key=hidden{'x' * 9000} HTTP/1.1\r\nhost: x\r\n", 431, "headers_too_large"),
        (f"{LINE}authorization: Bearer hidden{'x' * 9000}\r\n", 431, "headers_too_large"),
        (f"{LINE}hidden key: x\r\n", 400, "bad_request"),
    ],
    ids=["line", "header", "name"],
)
async def test_a_request_that_cannot_be_parsed(request_head: str, status: int, code: str, caplog: pytest.LogCaptureFixture) -> None:
    app = web.Application()
    app.router.add_get("/", _serve)
    runner, listener = Runner(app, access_log=None, handler_cancellation=True), socket.create_server(("127.0.0.1", 0))
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        answers = []
        with caplog.at_level(logging.INFO):
            for head in (f"{LINE}connection: close\r\n", request_head):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(f"{head}\r\n".encode())
                answers.append((await reader.read()).decode())
                writer.close()
    finally:
        await runner.cleanup()
    assert answers[0].endswith("served") and answers[1].split()[1] == str(status) and f'"code": "{code}"' in answers[1]
    (record,) = caplog.records
    assert record.exc_info is None and "hidden" not in record.getMessage() + answers[1]


async def _serve(_: web.Request) -> web.Response:
    return web.Response(text="served")
