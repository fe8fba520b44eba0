"""`fairlead doctor` and `fairlead status` where nothing runs, and against something that is no router."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fairlead.errors import UserError
from fairlead.main import main
from fairlead.tools.doctor import look
from fairlead.tools.status import picture

PICTURE = {
    "service": "qwen",
    "policy": "PrefixAware",
    "index": "ok",
    "workers": [
        {"pod": "qwen-worker-0", "address": "127.0.0.1:1", "ready": True, "draining": True, "usable": False, "load": {"running": 3}}
    ],
}


@pytest.fixture
def router() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(PICTURE if self.path == "/fairlead/workers" else []).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_doctor_names_what_local_mode_needs() -> None:
    findings = {finding.what: finding for finding in look()}
    assert all(not finding.advice for finding in findings.values() if finding.needed), findings
    assert findings.keys() >= {"Python", "torch", "Redis server", "GPU", "kubectl"}


def test_status_shows_a_routers_workers(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["status", "--url", f"{router}/v1"])
    shown = capsys.readouterr().out
    assert left.value.code == 0 and "qwen-worker-0" in shown and "Draining" in shown and "index ok" in shown


def test_status_names_an_address_where_no_router_is(router: str) -> None:
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9/fairlead/workers"):
        picture("http://127.0.0.1:9")
    with pytest.raises(UserError, match="not a Fairlead router"):
        picture(f"{router}/elsewhere")


def test_status_with_nothing_running_says_what_to_do(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as left:
        main(["status"])
    assert left.value.code == 1 and "fairlead up -f FILE" in capsys.readouterr().out
