"""An answer that begins before its worker's: a stream that is held gets its 200 and comments, so that nothing on its way gives it up."""

from fairlead_router.wire.reply import Reply

COMMENT = b": held\n\n"
"""A line that every reader of server-sent events passes over."""


class HeldStream:
    """What the client of a stream is told while its request waits. Once `begun`, an error can only be an event."""

    def __init__(self, reply: Reply, request_id: str) -> None:
        self._reply, self._id = reply, request_id
        self.begun = False

    def keep_alive(self) -> None:
        if not self.begun:
            self.begun = True
            kind = (b"content-type", b"text/event-stream; charset=utf-8")
            self._reply.start(200, [kind, (b"cache-control", b"no-cache"), (b"x-request-id", self._id.encode())])
        self._reply.write(COMMENT)

    def fail(self, document: bytes) -> None:
        """The end: the error as the last event."""
        self._reply.end(b"data: " + document.replace(b"\n", b" ") + b"\n\n")
