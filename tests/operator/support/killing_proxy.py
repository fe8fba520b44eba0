"""A proxy between one operator and the API server: kills the operator with SIGKILL at its n-th write, before or after the server has it."""

import os
import signal
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import urllib3

READS = {"GET", "HEAD"}
UNCOUNTED = ("/leases", "/events")  # the lease is renewed by the clock, and Events are not part of the state
HOP = {"host", "connection", "transfer-encoding", "content-length"}


class KillingProxy:
    """`arm(n, after)` before the operator starts; `pid` says whom to kill. `writes` are those that were let through or killed at."""

    def __init__(self, upstream: str) -> None:
        self.pid: Callable[[], int] = lambda: 0
        self.writes: list[tuple[str, str]] = []
        self._at, self._after = 0, False
        self._lock = threading.Lock()
        there = urllib3.PoolManager(maxsize=16, cert_reqs="CERT_NONE", retries=False, timeout=400)
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fatal = proxy._counted(self.command, self.path)
                if fatal and not proxy._after:
                    proxy._kill(self)
                    return
                headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
                answer = there.request(self.command, upstream + self.path, body=body or None, headers=headers, preload_content=fatal)
                if fatal:
                    proxy._kill(self)
                    return
                self._answer(answer)

            def _answer(self, answer: urllib3.BaseHTTPResponse) -> None:
                """As it comes: a watch has no end."""
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
                self.send_header("Connection", "close")
                self.end_headers()
                self.close_connection = True
                try:
                    while chunk := answer.read1(65536, decode_content=False):
                        self.wfile.write(chunk)
                        self.wfile.flush()
                    answer.release_conn()
                except (OSError, urllib3.exceptions.HTTPError):
                    answer.close()  # the operator is gone, or the API server at the end of the tests

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def arm(self, write: int, *, after: bool) -> None:
        """Kill at this write, counted from 1; 0: never. `after`: the API server has answered, and the operator does not learn it."""
        self._at, self._after = write, after

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _counted(self, method: str, path: str) -> bool:
        """Is this the write to kill at? Writes after it, of a process that is about to end, are for the dead too."""
        if method in READS or any(part in path for part in UNCOUNTED):
            return False
        with self._lock:
            self.writes.append((method, path.partition("?")[0]))
            return len(self.writes) == self._at

    def _kill(self, handler: BaseHTTPRequestHandler) -> None:
        os.kill(self.pid(), signal.SIGKILL)
        handler.close_connection = True
