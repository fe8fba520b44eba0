"""The environment of all rows: an API server, Kubernetes' controllers and scheduler, four nodes, and the operator.

Deadlines of minutes, after which the operator reports a component that does not act, are seconds here.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.operator.support import apiserver, controllers
from tests.operator.support.cluster import install_crds
from tests.operator.support.manifests import manifest
from tests.operator.support.running_operator import StubRouter, run_operator
from tests.operator.support.stub_server import StubServer
from tests.servers.redis_server import free_port
from tests.worker.weights.hub import Hub

from fairlead.kube.api import Kube
from fairlead.kube.explain import Report, explain
from fairlead.kube.facts import read_facts
from fairlead_operator import run
from fairlead_operator.api.rollout import Rollout
from fairlead_operator.causes import unresponsive
from fairlead_operator.kube.leader_election import LeaderElector, Timing
from fairlead_operator.polling import index, pod_events
from fairlead_operator.status import capacity, serving
from fairlead_operator.status import index as index_status

from .case import Case
from .network import Network, ServiceProber
from .row import Row
from .worker_errors import WorkerErrors

CONTROLLERS = ("deployment", "replicaset", "job", "resourcequota", "horizontal-pod-autoscaler", "resourceclaim")
BASE = {"routing": {"replicas": 1}}
MANY = 8  # rows at the same time


class Environment:
    """`stop_controllers`: stop kube-controller-manager for good."""

    def __init__(self, server: apiserver.ApiServer, network: Network, errors: WorkerErrors, folder: Path, metrics_url: str) -> None:
        self._server, self._network, self._errors, self._folder = server, network, errors, folder
        self._metrics_url = metrics_url
        self._kube = Kube.connect(str(server.kubeconfig))
        self.stop_controllers: Callable[[], None] = lambda: None

    def produce(self, rows: list[tuple[str, Row]]) -> dict[str, Report | Exception]:
        """Produce the rows, each in the namespace of this name.

        Returns what `explain` says once conditions and Event are as expected, or an error that says what there is instead.
        """
        with ThreadPoolExecutor(MANY) as pool:
            made = {name: pool.submit(self._produce, name, row) for name, row in rows}
        return {name: error if isinstance(error := one.exception(), Exception) else one.result() for name, one in made.items()}

    def refusal(self, spec: Mapping[str, Any]) -> str:
        """Return the API server's answer to a service with this spec; empty: it takes it."""
        path = "/apis/fairlead.dev/v1alpha1/namespaces/default/inferenceservices?dryRun=All"
        code, answer = self._server.request("POST", path, manifest("qwen", "default", **spec))
        return "" if code < 300 else str(answer["message"])

    def scrape(self) -> str:
        """Return the operator's metrics."""
        return httpx.get(self._metrics_url).text

    def scrape_routers(self) -> dict[str, str]:
        """Return namespace → the metrics of its real router."""
        return {namespace: httpx.get(f"{url}/metrics").text for namespace, url in self._network.admin_urls.items()}

    def _produce(self, namespace: str, row: Row) -> Report:
        folder = self._folder / namespace
        folder.mkdir()
        self._server.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        case = Case(self._server, namespace, self._network, self._errors, folder)
        row.prepare(case)
        case.create(**{**BASE, **row.spec})
        row.produce(case)
        try:
            case.until(lambda: row.expected.items() <= _conditions(case).items() and (row.event, row.reason) in _events(case))
        except AssertionError:
            found = f"there are {_conditions(case)}, and Events {_events(case)}"
            raise AssertionError(f"no {row.expected} with an Event of type {row.event}; {found}") from None
        return explain(read_facts(self._kube, namespace, "qwen"), datetime.now(UTC))


@contextmanager
def start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Environment]:
    _shorten_deadlines(monkeypatch)
    (folder / "hub").mkdir()
    (folder / "errors").mkdir()
    (folder / "hub" / "config.json").write_text("{}")
    health, stub = free_port(), StubRouter()
    prober = ServiceProber(stub.url)
    flags = ["--horizontal-pod-autoscaler-sync-period=1s", "--resource-quota-sync-period=2s"]
    with Hub(folder / "hub") as hub, StubServer(_refuse) as store, Network(prober) as network, apiserver.start() as server:
        errors = WorkerErrors(folder / "errors", hub.url, store.url)
        install_crds(server)
        _make_nodes(server)
        names = [f"{name}-controller" for name in CONTROLLERS]
        with (
            controllers.run_components(server, folder, names, *flags) as processes,
            run_operator(
                server.kubeconfig, "", stub.url, prober=prober, lease_namespace="default", default_gpus=0, health_port=health, redis_url=""
            ),
        ):
            made = Environment(server, network, errors, folder, f"http://127.0.0.1:{health}/metrics")
            made.stop_controllers = lambda: os.kill(processes["kube-controller-manager"].pid, signal.SIGSTOP)
            yield made
    stub.close()


def _refuse(method: str, path: str, body: bytes) -> tuple[int, Any]:
    """Answer as a store: 401 for bucket `asked`, 403 for all others."""
    return (401 if path.startswith("/asked") else 403), {"Code": "AccessDenied"}


def _shorten_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: tuple[tuple[Any, str, float], ...] = (
        (unresponsive, "GRACE", 5.0),
        (unresponsive, "NODE_GRACE", 5.0),
        (unresponsive, "NOT_READY_GRACE", 2.0),
        (pod_events, "STUCK_AFTER", 0.2),
        (pod_events, "PERIOD", 1.0),
        (capacity, "GRACE", 5.0),
        (index_status, "UNAVAILABLE_GRACE", 1.0),
        (index, "FIRST_DELAY", 0.5),
        (serving, "RETRY_LONGEST", 0.5),
    )
    for module, name, value in seconds:
        monkeypatch.setattr(module, name, value)
    shorter = {30: 12}  # the least of the CRD; a Deployment's must be more than its minReadySeconds
    deadline = property(lambda self: shorter.get(given := self.__dict__["progress_deadline_seconds"], given))
    monkeypatch.setattr(Rollout, "progress_deadline_seconds", deadline, raising=False)
    lasting = partial(LeaderElector, timing=Timing(600.0, 500.0))  # a busy machine must not end this process
    monkeypatch.setattr(run, "LeaderElector", lasting)


def _make_nodes(server: apiserver.ApiServer) -> None:
    """`cpu` takes every pod. The others have a fault, and take only pods that select them."""
    specs: dict[str, dict[str, Any]] = {
        "cpu": {"taints": None},
        "tainted": {"taints": [{"key": "team", "value": "research", "effect": "NoSchedule"}]},
        "cordoned": {"taints": None, "unschedulable": True},
        "small": {"taints": None},
    }
    for name, spec in specs.items():
        controllers.make_node(server, name, gpus=0)
        controllers.patch(server, f"/api/v1/nodes/{name}", {"spec": spec})
        room = {"cpu": "64", "memory": "1Ti", "pods": "0" if name == "small" else "500", "ephemeral-storage": "1Ti"}
        controllers.patch(server, f"/api/v1/nodes/{name}/status", {"status": {"capacity": room, "allocatable": room}})


def _conditions(case: Case) -> dict[str, tuple[str, str]]:
    """Return type → status, reason."""
    status = case.get("inferenceservices", "qwen").get("status") or {}
    return {one["type"]: (one["status"], one["reason"]) for one in status.get("conditions") or []}


def _events(case: Case) -> set[tuple[str, str]]:
    """Return type and reason of each Event of the service."""
    found = case.server.get(f"/apis/events.k8s.io/v1/namespaces/{case.namespace}/events")["items"]
    return {(one["type"], one["reason"]) for one in found if one["regarding"]["kind"] == "InferenceService"}
