"""Fixtures of all end-to-end tests, with one cluster for the session, and the progress that a run prints.

A run prints a line when a test or a long step begins and ends, and one every 30 seconds in between.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from e2e import progress
from e2e.cluster import Cluster
from e2e.system import Images, System


def pytest_configure() -> None:
    """Print progress to the real standard error: pytest does not capture yet, but does while fixtures and tests run."""
    progress.write_to(os.dup(2))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Print when a test begins, with its fixtures, and when it ends."""
    with progress.step(item.nodeid, ending="ended after"):
        return (yield)


def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    """Count what passed without a dot: the test's own lines show it."""
    return ("passed", "", "") if report.when == "call" and report.passed else None


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A real Kubernetes: the caller's KUBECONFIG, kind, or one on this machine. FAIRLEAD_KEEP_CLUSTER=1 keeps it for the next run."""
    with Cluster.acquire(os.environ.get("FAIRLEAD_CLUSTER", "default")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def system(cluster: Cluster) -> Iterator[System]:
    """The product's images on the nodes, a namespace for services and a client pod; the chart is not installed yet."""
    system = System(cluster, Images.build(cluster))
    system.prepare()
    yield system
    with progress.step("remove Fairlead from the cluster"):
        system.remove()


@pytest.fixture(scope="session")
def installed(system: System) -> System:
    """Install the chart, or upgrade the same release to its default values."""
    system.install()
    return system
