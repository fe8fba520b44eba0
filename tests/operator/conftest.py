"""Fixtures of the operator's tests."""

import uuid
from collections.abc import Iterator

import pytest
from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster
from tests.operator.support.running_operator import StubRouter, run_operator

from fairlead_operator.api.crd import custom_resource_definition, profile_definition


@pytest.fixture(scope="session")
def server() -> Iterator[apiserver.ApiServer]:
    """One API server for the session, with the CRD installed."""
    problem = apiserver.missing()
    if problem:
        pytest.skip(problem)
    with apiserver.start() as running:
        crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        running.create(crds, custom_resource_definition())
        running.create(crds, profile_definition())
        apiserver.wait_for_crd(running)
        yield running


@pytest.fixture
def namespace(server: apiserver.ApiServer) -> str:
    """A namespace of the test's own."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    server.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


@pytest.fixture
def router() -> Iterator[StubRouter]:
    made = StubRouter()
    yield made
    made.close()


@pytest.fixture
def cluster(server: apiserver.ApiServer, namespace: str, router: StubRouter) -> Iterator[Cluster]:
    """The namespace with a running operator."""
    with run_operator(server.kubeconfig, namespace, router.url):
        yield Cluster(server, namespace)
