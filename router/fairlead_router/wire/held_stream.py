"""An answer that begins before its worker's: a stream that is held gets its 200 and signs of life, so that nothing gives it up."""

from fairlead_common.protocols import errors as protocol_errors
from fairlead_router.wire.response import Reply


class HeldStream:
    """What the client of a stream is told while its request waits. Once `begun`, an error can only be an event."""

    def __init__(self, reply: Reply, request_id: str, path: str = "") -> None:
        """`path`: whose API's events they are."""
        self._reply, self._id, self._path = reply, request_id, path
        self.has_started = False

    def keep_alive(self) -> None:
        if not self.has_started:
            self.has_started = True
            kind = (b"content-type", b"text/event-stream; charset=utf-8")
            self._reply.start(200, [kind, (b"cache-control", b"no-cache"), (b"x-request-id", self._id.encode())])
        self._reply.write(protocol_errors.keep_alive(self._path))

    def fail(self, document: bytes) -> None:
        """The end: the error as the last event."""
        self._reply.end(protocol_errors.event(self._path, document))
