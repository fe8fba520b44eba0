"""An answer that begins before its worker's: a stream that is held gets its 200 and comments, so that nothing on its way gives it up."""

from collections.abc import MutableMapping
from typing import Any

from fairlead_router.errors import Headers, Send

COMMENT = b": held\n\n"
"""A line that every reader of server-sent events passes over."""


class HeldAnswer:
    """Takes the place of `send`. What then comes is passed on if it is a stream; of anything else the body becomes an error event."""

    def __init__(self, send: Send, headers: Headers) -> None:
        self._send, self._headers = send, headers
        self._document: bytearray | None = None
        self.begun = False

    async def keep_alive(self) -> None:
        if not self.begun:
            self.begun = True
            fixed = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": fixed + self._headers})
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if not self.begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            kind = next((value for name, value in message["headers"] if name == b"content-type"), b"")
            stream = message["status"] == 200 and kind.startswith(b"text/event-stream")
            self._document = None if stream else bytearray()
        elif self._document is None:
            await self._send(message)
        else:
            self._document += message["body"]
            if not message.get("more_body"):
                event = b"data: " + bytes(self._document).replace(b"\n", b" ") + b"\n\n"
                await self._send({"type": "http.response.body", "body": event})
