"""The whole operator in a thread of its own, against a given API server; and a stand-in for the routers that answers its requests."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from fairlead_operator.config import OperatorConfig
from fairlead_operator.reconcile.prober import Prober
from fairlead_operator.running import operate


class Router:
    """Answers completions, or fails them, and says what it sees of the index; counts what it was asked."""

    def __init__(self) -> None:
        self.failing = False
        self.asked: list[dict[str, object]] = []
        self.page: dict[str, object] = {"index": "ok", "index_reason": "", "index_read": "mirror", "workers": []}
        self.split: dict[str, object] = {}
        self.looks = 0
        self.loading: dict[str, object] = {}
        """What a worker answers on /ready: the same address stands for all pods."""
        self.asked_loading = 0
        self.demand: dict[str, object] | None = None
        self.demands = 0
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                router.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                answer = {"error": {"message": "no worker"}} if router.failing else {"choices": [{"text": "!"}]}
                self._answer(503 if router.failing else 200, answer)

            def do_GET(self) -> None:
                if self.path == "/ready":
                    router.asked_loading += 1
                    self._answer(503, router.loading)
                    return
                if self.path.startswith("/fairlead/demand"):
                    router.demands += 1
                    self._answer(404 if router.demand is None else 200, router.demand)
                    return
                router.looks += 1
                known = {"/fairlead/workers": router.page, "/fairlead/split": router.split}
                self._answer(200 if self.path in known else 404, known.get(self.path))

            def _answer(self, code: int, answer: object) -> None:
                text = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def operator(kubeconfig: Path, namespace: str, router_url: str, **flags: object) -> Iterator[None]:
    """Runs while the context lasts; an operator that ends by itself fails the test."""
    flags = {"worker_image": "worker:1", "router_image": "control:1", "redis_url": "redis://redis:6379", **flags}
    flags = {"namespace": namespace, "lease_namespace": namespace, "health_port": 0, "kubeconfig": str(kubeconfig), **flags}
    config = OperatorConfig(**cast(Any, flags))
    loop, stop, ended = asyncio.new_event_loop(), asyncio.Event(), []

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(operate(config, stop, Prober("cluster.local", base_url=router_url)))
        except BaseException as error:
            ended.append(error)
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="operator")
    thread.start()
    try:
        yield
        assert not ended, ended
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=30)
        assert not thread.is_alive(), "the operator did not stop"
    assert not ended, ended
