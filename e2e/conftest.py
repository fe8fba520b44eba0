"""What all end-to-end tests share: one cluster for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A real Kubernetes: the caller's KUBECONFIG, kind, or one of our own. FAIRLEAD_KEEP_CLUSTER=1 leaves it up for the next run."""
    with Cluster.acquire() as cluster:
        yield cluster
