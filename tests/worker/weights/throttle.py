"""An HTTP proxy that passes on a limited number of answers: the others wait, or are rejected."""

import http.client
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit


class Throttle:
    """Passes GET and HEAD on. `allow(n)`: n bodies of more than `small` bytes may pass; `open()`: all; `fail`: a status for all."""

    def __init__(self, upstream: str, small: int = 65_536) -> None:
        self._upstream, self._small = urlsplit(upstream).netloc, small
        self._allowed, self._lock, self._more, self._closed = 0, Lock(), Event(), False
        self.fail: tuple[int, bytes] | None = None
        self.passed: list[tuple[str, str]] = []
        """(path, Range) of every large body passed on."""
        self.authorizations: set[str] = set()
        """Values of the header Authorization that the upstream was asked with."""
        throttle = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                throttle._answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *_: Any) -> None:
                """A client that was killed."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Throttle":
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed = True
        self._more.set()
        self._server.shutdown()
        self._server.server_close()

    def allow(self, count: int) -> None:
        with self._lock:
            self._allowed += count
            self._more.set()

    def open(self) -> None:
        self.allow(1 << 30)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        if self.fail is not None:
            return self._send(request, self.fail[0], {}, self.fail[1])
        upstream = http.client.HTTPConnection(self._upstream, timeout=20)
        headers = {name: value for name, value in request.headers.items() if name.lower() != "connection"}
        self.authorizations.add(request.headers.get("Authorization", ""))
        upstream.request(request.command, request.path, headers=headers)
        answer = upstream.getresponse()
        body = answer.read()
        upstream.close()
        if len(body) > self._small:
            self._wait_for_leave()
            self.passed.append((request.path.partition("?")[0], request.headers.get("Range", "")))
        passed = {
            name: value for name, value in answer.getheaders() if name.lower() not in ("transfer-encoding", "connection", "server", "date")
        }
        return self._send(request, answer.status, passed, body)

    def _wait_for_leave(self) -> None:
        while not self._closed:
            with self._lock:
                if self._allowed:
                    self._allowed -= 1
                    return
                self._more.clear()
            self._more.wait()

    def _send(self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)
