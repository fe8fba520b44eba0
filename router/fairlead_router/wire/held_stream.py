"""Keep-alives of a held stream: it gets its 200 and comments before the worker's answer, so that no intermediary times out."""

from fairlead_common.http.response import Reply
from fairlead_common.protocols import errors as protocol_errors


class HeldStream:
    """Client side of a stream whose request waits. Once it has started, errors can only be events."""

    def __init__(self, reply: Reply, request_id: str, path: str = "") -> None:
        """`path`: determines the API whose event format is used."""
        self._reply, self._id, self._path = reply, request_id, path
        self.has_started = False

    def keep_alive(self) -> None:
        if not self.has_started:
            self.has_started = True
            kind = (b"content-type", b"text/event-stream; charset=utf-8")
            self._reply.start(200, [kind, (b"cache-control", b"no-cache"), (b"x-request-id", self._id.encode())])
        self._reply.write(protocol_errors.keep_alive(self._path))

    def fail(self, document: bytes) -> None:
        """End the stream with the error as the last event."""
        self._reply.end(protocol_errors.event(self._path, document))
