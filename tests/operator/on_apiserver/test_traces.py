"""The operator on a real API server exports a trace of each reconcile."""

import pytest
from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster, eventually
from tests.operator.support.running_operator import StubRouter, run_operator
from tests.servers.otlp_receiver import otlp_receiver


def test_a_new_service_is_one_trace_with_the_writes_of_its_children(
    server: apiserver.ApiServer, namespace: str, router: StubRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with otlp_receiver() as receiver, run_operator(server.kubeconfig, namespace, router.url, otlp_endpoint=receiver.endpoint):
        Cluster(server, namespace).create()
        first = eventually(lambda: [span for span in receiver.spans if span.name == "reconcile"])[0]
        spans = receiver.of_trace(first.trace_id)
    assert first.service == "fairlead-operator" and first.attributes["k8s.namespace.name"] == namespace
    names = {span.name for span in spans}
    assert {"queue", "apply", "PATCH deployments", "PATCH services", "PATCH inferenceservices/status"} <= names
    assert not any(span.failed for span in spans if span.name.startswith("PATCH"))
