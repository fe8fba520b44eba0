"""Traces of reconciles, with the real client of the API server and a real receiver of spans; the API server is a stand-in."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.operator.support.manifests import manifest
from tests.operator.support.stub_server import StubServer
from tests.servers.otlp_receiver import ReceivedSpan, Receiver, otlp_receiver

from fairlead_common.telemetry.spans import NO_SPAN
from fairlead_common.telemetry.tracer import Tracer, create_tracer
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.kinds import SERVICES
from fairlead_operator.kube.tracing import resource_of, trace_part, trace_reconcile
from fairlead_operator.kube.workqueue import WorkQueue
from fairlead_operator.process.metrics import Metrics
from fairlead_operator.reconcile.applier import ServiceGone


def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
    return (404, {"message": "no such service"}) if "/absent" in path else (200, {"metadata": {"name": "qwen"}})


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    with StubServer(answer) as server:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": server.url}}],
            "users": [{"name": "test", "user": {"token": "t"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(config))
        async with Cluster.connect(str(path)) as cluster:
            yield cluster


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture
def tracer(receiver: Receiver) -> Tracer:
    made = create_tracer("fairlead-operator", receiver.endpoint, {})
    assert made is not None
    return made


def exported(tracer: Tracer, receiver: Receiver) -> dict[str, ReceivedSpan]:
    tracer.close()
    return {span.name: span for span in receiver.spans}


def body() -> dict[str, Any]:
    made = manifest()
    made["metadata"] |= {"uid": "u", "resourceVersion": "5", "generation": 1}
    return made


async def test_a_pass_is_one_trace_with_a_span_for_each_request(cluster: Cluster, tracer: Tracer, receiver: Receiver) -> None:
    with trace_reconcile(tracer, "ml", "qwen", harmless=ServiceGone):
        async with Metrics().measure_reconcile(WorkQueue(1), urgent=False):
            with trace_part("apply"):
                await cluster.get(SERVICES, "ml", "qwen")
            await cluster.patch_status(body(), {"replicas": 1})
    spans = exported(tracer, receiver)
    root = spans["reconcile"]
    assert root.attributes == {"k8s.namespace.name": "ml", "fairlead.inference_service": "qwen"} and not root.parent_id
    parents = {name: span.parent_id for name, span in spans.items() if span is not root}
    assert parents == {
        "queue": root.span_id,
        "apply": root.span_id,
        "GET inferenceservices": spans["apply"].span_id,
        "PATCH inferenceservices/status": root.span_id,
    }
    assert {span.trace_id for span in spans.values()} == {root.trace_id} and not any(span.failed for span in spans.values())
    assert spans["GET inferenceservices"].attributes["http.response.status_code"] == 200


async def test_a_failed_request_fails_its_span_and_the_pass(cluster: Cluster, tracer: Tracer, receiver: Receiver) -> None:
    absent = body()
    absent["metadata"]["name"] = "absent"
    with pytest.raises(ApiError), trace_reconcile(tracer, "ml", "absent", harmless=ServiceGone):
        await cluster.patch_status(absent, {})
    spans = exported(tracer, receiver)
    assert spans["reconcile"].failed and spans["PATCH inferenceservices/status"].failed
    assert spans["PATCH inferenceservices/status"].attributes["http.response.status_code"] == 404


async def test_the_end_of_a_service_is_no_failure(tracer: Tracer, receiver: Receiver) -> None:
    with pytest.raises(ServiceGone), trace_reconcile(tracer, "ml", "qwen", harmless=ServiceGone):
        raise ServiceGone
    assert not exported(tracer, receiver)["reconcile"].failed


async def test_a_task_that_outlives_its_pass_adds_nothing_to_it(cluster: Cluster, tracer: Tracer, receiver: Receiver) -> None:
    ended = asyncio.Event()

    async def probe() -> None:
        await ended.wait()
        await cluster.get(SERVICES, "ml", "qwen")

    with trace_reconcile(tracer, "ml", "qwen", harmless=ServiceGone):
        task = asyncio.create_task(probe())
        await asyncio.sleep(0)
    ended.set()
    await task
    assert list(exported(tracer, receiver)) == ["reconcile"]


async def test_without_a_tracer_nothing_is_recorded(cluster: Cluster) -> None:
    with trace_reconcile(None, "ml", "qwen", harmless=ServiceGone) as span, trace_part("apply") as part:
        assert span is part is NO_SPAN
        assert await cluster.get(SERVICES, "ml", "qwen") is not None


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/apis/apps/v1/namespaces/ml/deployments/qwen-worker", "deployments"),
        ("/apis/fairlead.dev/v1alpha1/namespaces/ml/inferenceservices/qwen/status", "inferenceservices/status"),
        ("/api/v1/namespaces/ml/events", "events"),
        ("/api/v1/pods", "pods"),
        ("/apis/apps/v1", "v1"),
    ],
)
def test_spans_are_named_by_resource(path: str, resource: str) -> None:
    assert resource_of(path) == resource
