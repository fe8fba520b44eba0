"""A fake Hugging Face hub: the few endpoints that the hub client's snapshot_download uses, on 127.0.0.1."""

import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_open_sesame"
_INFO = re.compile(r"/api/models/([\w.-]+/[\w.-]+)(?:/revision/([\w.%-]+))?$")
_TREE = re.compile(r"/api/models/([\w.-]+/[\w.-]+)/tree/([\w.%-]+)")
_FILE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/([\w.%-]+)/(.+)$")


class Hub:
    """Serves `folder` as tiny/model (revisions main and v1), refuses gated/model (403), private/model (needs TOKEN) and any other (404).

    limited/model gets 429, and for broken/model the connection ends without an answer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []
        self.sent = 0
        """Bytes of files."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "Hub":
        Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = request.path.partition("?")[0]
        match = _INFO.match(path) or _TREE.match(path) or _FILE.match(path)
        if not match:
            return self._send(request, 404, b"{}", {}, body)
        repository, revision = match[1], match[2] or "main"
        if repository == "broken/model":
            request.close_connection = True
            return None
        if repository == "limited/model":
            return self._send(request, 429, b"{}", {}, body)
        if repository == "gated/model":
            return self._send(request, 403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask for access"}, body)
        allowed = repository == "tiny/model" or (
            repository == "private/model" and request.headers.get("Authorization") == f"Bearer {TOKEN}"
        )
        if not allowed:
            status = 401 if repository == "private/model" else 404
            return self._send(request, status, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        if revision not in ("main", "v1", COMMIT):
            return self._send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        if _INFO.match(path):
            return self._json(request, {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": f.name} for f in self._files()]}, body)
        if _TREE.match(path):
            entries = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": self._etag(f)} for f in self._files()]
            return self._json(request, entries, body)
        file = self.folder / match[3]
        if body:
            self.fetched.append(file.name)
        headers = {"ETag": f'"{self._etag(file)}"', "X-Repo-Commit": COMMIT}
        status, content = 200, file.read_bytes()
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", "")):
            headers["Content-Range"] = f"bytes {match[1]}-{match[2]}/{len(content)}"
            status, content = 206, content[int(match[1]) : int(match[2]) + 1]
        self.sent += len(content) if body else 0
        return self._send(request, status, content, headers, body)

    def _files(self) -> list[Path]:
        return sorted(self.folder.iterdir())

    def _etag(self, file: Path) -> str:
        return hashlib.sha1(file.read_bytes()).hexdigest()

    def _json(self, request: BaseHTTPRequestHandler, value: Any, body: bool) -> None:
        self._send(request, 200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body)

    def _send(self, request: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(content)
