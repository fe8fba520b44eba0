"""The whole operator in a thread of its own, against a given API server; and a stand-in for the routers that answers its requests."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from tests.operator.support.stub_server import StubServer

from fairlead_operator.config import OperatorConfig
from fairlead_operator.polling.prober import Prober
from fairlead_operator.run import operate


class StubRouter:
    """Answers completions, or fails them, and reports its view of the index; counts the requests."""

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
        self._server = StubServer(self._answer)
        self.url = self._server.url

    def _answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        if method == "POST" and not path.startswith("/fairlead/demand"):
            self.asked.append(json.loads(body))
            return (503, {"error": {"message": "no worker"}}) if self.failing else (200, {"choices": [{"text": "!"}]})
        if path == "/ready":
            self.asked_loading += 1
            return 503, self.loading
        if path.startswith("/fairlead/demand"):
            self.demands += 1
            return 404 if self.demand is None else 200, self.demand
        self.looks += 1
        known = {"/fairlead/workers": self.page, "/fairlead/split": self.split}
        return 200 if path in known else 404, known.get(path)

    def close(self) -> None:
        self._server.close()


@contextmanager
def run_operator(kubeconfig: Path, namespace: str, router_url: str, *, prober: Prober | None = None, **flags: object) -> Iterator[None]:
    """Runs while the context lasts, with KUBECONFIG for kopf and kubectl. An operator that ends by itself fails the test.

    `prober`: in place of one that asks `router_url`.
    """
    flags = {"worker_image": "worker:1", "router_image": "control:1", "redis_url": "redis://redis:6379", "hub_endpoint": "", **flags}
    flags = {"namespaces": namespace, "lease_namespace": namespace, "health_port": 0, "kubeconfig": str(kubeconfig), **flags}
    config = OperatorConfig(**cast(Any, flags))
    loop, stop, ended = asyncio.new_event_loop(), asyncio.Event(), []

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(operate(config, stop, prober or Prober("cluster.local", base_url=router_url)))
        except BaseException as error:
            ended.append(error)
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="operator")
    patch = pytest.MonkeyPatch()
    patch.setenv("KUBECONFIG", str(kubeconfig))
    thread.start()
    try:
        yield
        assert not ended, ended
    finally:
        patch.undo()
        if thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=30)
        assert not thread.is_alive(), "the operator did not stop"
    assert not ended, ended
