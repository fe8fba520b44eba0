"""Fixtures of the operator's tests."""

import uuid
from collections.abc import Iterator

import pytest
from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster, install_crds
from tests.operator.support.running_operator import StubRouter, run_operator


@pytest.fixture(scope="session")
def server() -> Iterator[apiserver.ApiServer]:
    """One API server for the session, with the CRD installed."""
    problem = apiserver.missing()
    if problem:
        pytest.skip(problem)
    with apiserver.start() as running:
        install_crds(running)
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
