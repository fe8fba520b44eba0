"""`fairlead verify` against services that fail it, each in its own way."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fairlead.main import main
from fairlead.tools import verify


class Service(BaseHTTPRequestHandler):
    """Streams two chunks and a usage, as its class attributes say."""

    cached = 0
    status = 200
    usage = True
    error = False
    unready = 0  # number of 503 answers before the first success
    key = ""
    asked: "list[str]" = []  # noqa: RUF012

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = type(self)
        kind.asked.append(asked["prompt"])
        if kind.unready:
            kind.unready -= 1
            self._answer(503, "no worker is ready")
            return
        if kind.key and self.headers.get("Authorization") != f"Bearer {kind.key}":
            self._answer(401, "no key")
            return
        if kind.status != 200:
            self._answer(kind.status, "no")
            return
        events = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}]
        if kind.error:
            events[1] = {"error": {"message": "the worker died"}}  # type: ignore[dict-item]
        if kind.usage:
            events.append({"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": kind.cached}}})  # type: ignore[dict-item]
        self._answer(200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Service], str]]:
    monkeypatch.setattr(verify, "PAUSE", 0.01)
    kind = type("Mine", (Service,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield kind, f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_cache_that_is_never_hit_is_a_failure(service: tuple[type[Service], str], capsys: pytest.CaptureFixture[str]) -> None:
    kind, url = service
    assert run(url) == 1
    out = capsys.readouterr().out
    assert "did not hit the cache of the first" in out and "spec.routing.policy" in out
    assert len(kind.asked) == 1 + verify.ATTEMPTS and len(set(kind.asked)) == 1, "exactly the same prompt"


def test_a_short_outage_between_two_completions_is_waited_for(service: tuple[type[Service], str]) -> None:
    kind, url = service
    complete = kind.do_POST

    def once_away(self: Service) -> None:
        kind.unready, kind.cached = int(len(kind.asked) == 1), 8 * (len(kind.asked) > 0)
        complete(self)

    kind.do_POST = once_away  # type: ignore[method-assign]
    assert run(url, "--model=m", "--wait=30") == 0
    assert len(kind.asked) == 3


def test_an_answer_of_another_program_is_recognised(service: tuple[type[Service], str], capsys: pytest.CaptureFixture[str]) -> None:
    kind, url = service
    kind.do_GET = lambda self: self._answer(200, "<html>")  # type: ignore[method-assign]
    assert run(url) == 2
    assert "is not an OpenAI API" in capsys.readouterr().err


def test_verify_waits_for_a_service_that_starts(service: tuple[type[Service], str], capsys: pytest.CaptureFixture[str]) -> None:
    kind, url = service
    kind.unready, kind.status = 3, 200
    run(url, "--model=m", "--wait=30")
    out = capsys.readouterr().out
    assert out.count("not yet: 503 no worker is ready") == 1 and "first:" in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"status": 400}, "answered 400"),
        ({"status": 503}, "does not answer: 503"),
        ({"usage": False}, "without usage"),
        ({"error": True}, "the stream ended with an error: the worker died"),
        ({"key": "k"}, "requires an API key: give --api-key-file"),
    ],
)
def test_a_failing_service_is_reported_with_the_reason(
    service: tuple[type[Service], str], capsys: pytest.CaptureFixture[str], change: dict[str, object], words: str
) -> None:
    kind, url = service
    for name, value in change.items():
        setattr(kind, name, value)
    assert run(url, "--wait=0") == 2
    assert words in capsys.readouterr().err


def test_the_key_is_read_from_its_file(service: tuple[type[Service], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, url = service
    kind.key = "secret"
    (tmp_path / "key").write_text("secret\n")
    assert run(url, f"--api-key-file={tmp_path / 'key'}") == 1 and "first:" in capsys.readouterr().out
    assert run(url, f"--api-key-file={tmp_path / 'none'}") == 2


@pytest.mark.parametrize("url", ["qwen.default.svc/v1", "http://[/v1", "http://"])
def test_an_invalid_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(url, "--wait=0") == 2
    assert f"URL {url}: must be http://HOST[:PORT] or https://HOST[:PORT]" in capsys.readouterr().err


def test_an_unreachable_service_is_an_error_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("http://127.0.0.1:9/v1", "--wait=0") == 2
    assert "does not answer: ConnectError" in capsys.readouterr().err
