"""Fixtures of the operator's tests."""

import time
import uuid
from collections.abc import Iterator

import pytest
from tests.operator import apiserver
from tests.operator.running_operator import Router

from fairlead_operator.api.crd import custom_resource_definition


@pytest.fixture(scope="session")
def server() -> Iterator[apiserver.ApiServer]:
    """One API server for the session, with the CRD installed."""
    problem = apiserver.missing()
    if problem:
        pytest.skip(problem)
    with apiserver.running() as running:
        crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        running.create(crds, custom_resource_definition())
        await_crd(running)
        yield running


def await_crd(server: apiserver.ApiServer) -> None:
    deadline = time.monotonic() + 30
    while server.request("GET", "/apis/fairlead.dev/v1alpha1/inferenceservices")[0] != 200:
        assert time.monotonic() < deadline, "the CRD was accepted and is not served"
        time.sleep(0.05)


@pytest.fixture
def namespace(server: apiserver.ApiServer) -> str:
    """A namespace of the test's own."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    server.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


@pytest.fixture
def router() -> Iterator[Router]:
    made = Router()
    yield made
    made.close()
