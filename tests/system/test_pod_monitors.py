"""A real Prometheus finds the operator's pods on a real API server by the chart's PodMonitors, and gives their series the right labels."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.operator.support import apiserver
from tests.operator.support.manifests import SETTINGS, service
from tests.operator.support.monitoring import objects
from tests.servers.pod_monitors import scrape_config
from tests.servers.prometheus_server import prometheus
from tests.system.processes import until

from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed


@contextmanager
def metrics_page() -> Iterator[int]:
    """Serve a metric as every process does, and yield the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(b"something 1\n")

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def running_pod(server: apiserver.ApiServer, name: str, template: dict[str, Any], port: int) -> None:
    """Create a pod with the labels and port names of a template, all at the one port of loopback, and say that it runs."""
    named = [{**each, "containerPort": port} for each in template["spec"]["containers"][0]["ports"]]
    container = {"name": "main", "image": "image:1", "ports": [each for each in named if each["name"] in ("admin", "health")]}
    metadata = {"name": name, "labels": template["metadata"]["labels"]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container], "nodeName": "node"}}
    server.create("/api/v1/namespaces/default/pods", body)
    status = {"status": {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}}
    code, answer = server.request("PATCH", f"/api/v1/namespaces/default/pods/{name}/status", status, "application/merge-patch+json")
    assert code == 200, answer


@pytest.mark.timeout(600)
def test_pods_of_the_operator_and_of_services_are_scraped_with_their_labels(tmp_path: Path) -> None:
    if problem := apiserver.missing():
        pytest.skip(problem)
    chart = {(each["kind"], each["metadata"]["name"]): each for each in objects()}
    made = desired(service(), Observed(), SETTINGS, datetime.now(UTC)).objects
    children = {each["metadata"]["name"]: each for each in made if each["kind"] == "Deployment"}
    templates = {
        "router-1": children["qwen-router"]["spec"]["template"],
        "worker-1": children["qwen-worker"]["spec"]["template"],
        "operator-1": chart["Deployment", "fl-fairlead-operator"]["spec"]["template"],
    }
    services, operator = (chart["PodMonitor", f"fl-fairlead-{name}"] for name in ("services", "operator"))
    operator = {**operator, "metadata": {**operator["metadata"], "namespace": "default"}}  # where this test creates its pods
    with apiserver.start() as server, metrics_page() as port:
        for name, template in templates.items():
            running_pod(server, name, template, port)

        with prometheus(tmp_path, [scrape_config(each, server.kubeconfig) for each in (services, operator)], []) as found:
            until(lambda: len(found.values("something")) == 3, "three pods are scraped", 120)
            labels = {
                each["pod"]: {key: each.get(key) for key in ("namespace", "service", "component")} for each in found.series("something")
            }
    assert labels == {
        "router-1": {"namespace": "default", "service": "qwen", "component": "router"},
        "worker-1": {"namespace": "default", "service": "qwen", "component": "worker"},
        "operator-1": {"namespace": "default", "service": None, "component": None},
    }
