"""A gateway between an agent's program and Fairlead that records both sides. It never changes an answer.

A trained model of this size seldom calls a tool by itself. So the gateway adds `structured_outputs` to a request, as any gateway may: a
regular expression that the answer matches. The model chooses within it, and Fairlead parses the call like one that the model makes freely.
A request with a `tool_choice` of its own passes unchanged. The gateway is also the program's HTTP proxy: a request to another host is
refused and recorded.
"""

import json
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from typing import Any, Self

import httpx

HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
TEXT = r"[A-Z][a-z]{1,8}( [a-z]{1,8}){2,6}\."
"""A short sentence."""
CONVERSATIONS = {"/v1/chat/completions": "messages", "/v1/messages": "messages", "/v1/responses": "input"}
"""The field with the conversation, for each path of an answer."""


def literal(text: str) -> str:
    """Return a regular expression of the Rust crate `regex` for `text`."""
    return re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text)


def call(tool: str, *arguments: dict[str, Any]) -> str:
    """Return a regular expression for a call of `tool` with one of `arguments`, in the format of `hermes`."""
    choices = "|".join(literal(json.dumps(each)) for each in arguments)
    return rf'<tool_call>\n\{{"name": "{tool}", "arguments": ({choices})\}}\n</tool_call>'


@dataclass(frozen=True)
class Exchange:
    """One request, as the program sent it, and its whole answer."""

    method: str
    path: str
    """Without its query."""
    request: str
    status: int
    answer: str
    warning: str
    """The header X-Fairlead-Warning, or an empty string."""

    @property
    def items(self) -> list[Any]:
        """Return the conversation in the request; empty for other requests."""
        items = json.loads(self.request)[CONVERSATIONS[self.path]] if self.path in CONVERSATIONS else []
        return items if isinstance(items, list) else [{"role": "user", "content": items}]


@dataclass
class Gateway:
    """Serve on a free loopback port while the context is open."""

    to: str
    """The URL of a worker or router, without a path."""
    patterns: Iterator[str] = field(default_factory=lambda: cycle([TEXT]))
    """For each question of a user. Other answers, such as those after a tool's result, are a `TEXT`."""
    needs_tools: bool = True
    """Whether a question without tools also gets a `TEXT`: programs ask for titles, too."""
    exchanges: list[Exchange] = field(default_factory=list)
    elsewhere: set[str] = field(default_factory=set)
    """Hosts that the program wanted to reach."""
    broken: list[str] = field(default_factory=list)
    """Exchanges that Fairlead or the gateway did not complete."""

    def __enter__(self) -> Self:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do(self) -> None:
                gateway._serve(self)

            do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_CONNECT = do

            def log_message(self, *_: Any) -> None: ...

        self._client = httpx.Client(base_url=self.to, timeout=280, trust_env=False)

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                error = sys.exception()
                if not isinstance(error, ConnectionError):  # a program that ends resets its idle connections
                    gateway.broken.append(repr(error))

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._client.close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        sent = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        if handler.command == "CONNECT" or "://" in handler.path:
            self.elsewhere.add(handler.path)
            handler.send_error(403, "no host but the gateway is reached")
            handler.close_connection = True
            return
        path = handler.path.partition("?")[0]
        headers = [(name, value) for name, value in handler.headers.items() if name.lower() not in HOP_BY_HOP]
        body = self._held(path, json.loads(sent)) if path in CONVERSATIONS else sent
        with self._client.stream(handler.command, handler.path, content=body, headers=headers) as answer:
            handler.send_response(answer.status_code)
            for name, value in answer.headers.multi_items():
                if name not in HOP_BY_HOP:
                    handler.send_header(name, value)
            handler.send_header("transfer-encoding", "chunked")
            handler.end_headers()
            got = b""
            for part in answer.iter_raw():
                got += part
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        warning = answer.headers.get("x-fairlead-warning", "")
        self.exchanges.append(Exchange(handler.command, path, sent.decode(), answer.status_code, got.decode(), warning))
        handler.wfile.write(b"0\r\n\r\n")

    def _held(self, path: str, body: dict[str, Any]) -> bytes:
        """Return the body with the form of its answer."""
        choice = body.get("tool_choice") or "auto"
        if choice in ("auto", "none", {"type": "auto"}):
            asked = (body.get("tools") or not self.needs_tools) and not _has_result(body[CONVERSATIONS[path]])
            body |= {"structured_outputs": {"regex": next(self.patterns) if asked else TEXT}}
        return json.dumps(body).encode()


def _has_result(items: Any) -> bool:
    """Return whether a conversation ends with a tool's result. Claude Code adds a system message after it."""
    for item in reversed(items if isinstance(items, list) else []):
        if item.get("role") == "system":
            continue
        if item.get("role") == "tool" or str(item.get("type")).endswith("_output"):
            return True
        parts = item.get("content")
        return isinstance(parts, list) and any(part.get("type") == "tool_result" for part in parts if isinstance(part, dict))
    return False
