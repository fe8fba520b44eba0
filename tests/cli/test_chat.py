"""`fairlead chat` against other servers: what it sends, and the line that it prints when one refuses."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fairlead.chat.client import ChatClient, ChatFailed
from fairlead.chat.command import _printable
from fairlead.chat.conversation import Conversation


class Server(ThreadingHTTPServer):
    """An endpoint that answers with `status`, `models` and `events`, and keeps what it was asked."""

    models: tuple[str, ...] = ("one",)
    status = 200
    events: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[list[dict[str, str]]] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": name} for name in self.server.models]}))

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"])
        self._answer("".join(f"data: {event}\n\n" for event in self.server.events))

    def _answer(self, text: str) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def _client(server: Server) -> ChatClient:
    return ChatClient(f"http://127.0.0.1:{server.server_port}", {})


def _piece(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


def test_the_conversation_is_kept(server: Server) -> None:
    server.events = (_piece("Hel"), _piece("lo"), "[DONE]")
    shown: list[str] = []
    conversation = Conversation(_client(server), "one", "Be short.", shown.append)
    assert conversation.ask("first") and conversation.ask("second") and shown[:2] == ["Hel", "lo"]
    assert [message["content"] for message in server.asked[1]] == ["Be short.", "first", "Hello", "second"]


def test_a_failed_answer_leaves_the_conversation_as_it_was(server: Server) -> None:
    server.events = (_piece("Hel"), json.dumps({"error": {"message": "the worker is gone"}}))
    conversation = Conversation(_client(server), "one", "", lambda text: None)
    with pytest.raises(ChatFailed, match="the answer ended with an error: the worker is gone"):
        conversation.ask("first")
    assert conversation.messages == []


def test_several_models_need_a_choice(server: Server) -> None:
    assert _client(server).only_model() == "one"
    server.models = ("b", "a")
    with pytest.raises(ChatFailed, match="serves 2 models; give --model, one of: a, b"):
        _client(server).only_model()


def test_a_refused_key_names_the_flag(server: Server) -> None:
    server.status = 401
    with pytest.raises(ChatFailed, match=r"refuses the key .401.: give --api-key-file"):
        _client(server).only_model()


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    assert _printable("a\x1b]0;title\x07\x00é\n\tb") == "a]0;titleé\n\tb"
