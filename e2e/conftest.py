"""What all end-to-end tests share: one cluster for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cluster import Cluster
from e2e.system import Images, System


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A real Kubernetes: the caller's KUBECONFIG, kind, or one of our own. FAIRLEAD_KEEP_CLUSTER=1 leaves it up for the next run."""
    with Cluster.acquire() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def system(cluster: Cluster) -> Iterator[System]:
    """The product's images on the nodes, a namespace for services and a client pod; the chart is not installed yet."""
    system = System(cluster, Images.on(cluster))
    system.prepare()
    yield system
    system.remove()


@pytest.fixture(scope="session")
def installed(system: System) -> System:
    """The chart is installed (again: it is the same release)."""
    system.install()
    return system
