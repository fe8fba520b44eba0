"""Maintenance while streams run: new arguments, a node drain, evictions, an operator upgrade."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from e2e.availability import Availability
from e2e.service import Load, Service
from e2e.system import HERE, System, eventually


@pytest.fixture(scope="module")
def service(installed: System) -> Iterator[Service]:
    service = Service(installed, "steady")
    with service.running(service.manifest(replicas=2), replicas=2):
        yield service


def uids(service: Service) -> set[str]:
    return {pod["metadata"]["uid"] for pod in service.pods()}


def test_new_arguments_roll_out_under_load(service: Service) -> None:
    before = uids(service)
    with Load(service, concurrency=2, max_tokens=96) as load, Availability(service) as seen:
        service.system.apply(service.manifest(replicas=2, engine={"maxNumSeqs": 48}))
        service.wait_ready(replicas=2)
        eventually(lambda: len(service.pods()) == 2 and not uids(service) & before, 120, "only pods of the new revision")
    load.assert_answered()
    assert len({pod.rpartition("-")[0] for pod in load.outcome["pods"]}) == 2, "both revisions served"
    assert seen.fewest == 2, "a surge pod is ready before an old one ends"


@pytest.mark.long
def test_kubectl_drain_moves_the_pods_one_by_one_under_load(service: Service) -> None:
    system, before = service.system, uids(service)
    [node] = {pod["spec"]["nodeName"] for pod in service.pods()}
    selector = f"app.kubernetes.io/instance={service.name},app.kubernetes.io/component=worker"
    drain = ["kubectl", "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", f"--pod-selector={selector}", "--timeout=180s"]
    with Load(service, concurrency=2, max_tokens=96) as load, Availability(service) as seen:
        draining = subprocess.Popen(
            system.cluster.command(drain), env=system.cluster.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:  # the cluster has one node: an evicted pod waits until it is uncordoned
            eventually(
                lambda: any(pod["status"]["phase"] == "Pending" for pod in service.pods()), 90, "an evicted pod's replacement, pending"
            )
            system.cluster.kubectl("uncordon", node)
            output, _ = draining.communicate(timeout=200)
        finally:
            draining.kill()
            system.cluster.kubectl("uncordon", node)
        assert draining.returncode == 0, output
        service.wait_ready(replicas=2)
        eventually(lambda: not uids(service) & before, 60, "only new pods")
    load.assert_answered()
    assert seen.fewest == 1, "the disruption budget allows one eviction at a time"


@pytest.mark.long
def test_an_eviction_beyond_the_budget_is_refused(service: Service) -> None:
    pods = [pod["metadata"]["name"] for pod in service.pods()]
    with Load(service, concurrency=2, max_tokens=96) as load:
        answers = [evict(service, name) for name in pods]
        assert answers[0].returncode == 0, answers[0].stderr
        assert answers[1].returncode != 0 and "disruption budget" in answers[1].stderr
        eventually(lambda: pods[0] not in [pod["metadata"]["name"] for pod in service.pods()], 60, "the evicted pod gone")
        service.wait_ready(replicas=2)
    load.assert_answered()


def evict(service: Service, pod: str) -> "subprocess.CompletedProcess[str]":
    namespace = service.system.models
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    return service.system.cluster.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(body), check=False)


def test_an_operator_upgrade_restarts_no_worker(service: Service) -> None:
    system, before = service.system, uids(service)

    def operators() -> Any:
        """Return the uids of the operator's pods, terminating ones included: they may lead until they have ended."""
        listed = system.get("pods", "-l", "app.kubernetes.io/component=operator", namespace=system.namespace)["items"]
        return {pod["metadata"]["uid"] for pod in listed}

    old, current = operators(), system.images
    later = replace(current, control=build_next(system, current.control), worker=build_next(system, current.worker))
    with Load(service, concurrency=2, max_tokens=96) as load, Availability(service) as seen:
        try:  # an upgrade also changes defaults
            system.install(images=system.image_values(later), defaults={"gpus": 1})
            eventually(lambda: operators() and not operators() & old, 120, "only the new operator")
            listed = system.get("pods", "-l", "app.kubernetes.io/component=operator", namespace=system.namespace)["items"]
            assert {image_of(pod) for pod in listed} == {later.control}
            service.system.apply(service.manifest(replicas=2, engine={"maxNumSeqs": 48}, routing={"replicas": 1}))
            eventually(lambda: len(service.pods("router")) == 1, 60, "an edit applied by the new operator")
            service.wait_ready(replicas=2)
            assert uids(service) == before and {image_of(pod) for pod in service.pods()} == {current.worker}, "no worker was restarted"
            system.apply(service.manifest(replicas=2, engine={"maxNumSeqs": 40}, resources={"gpus": 0}, routing={"replicas": 1}))
            eventually(lambda: {image_of(pod) for pod in service.pods()} == {later.worker}, 180, "the new revision in the new image")
            service.wait_ready(replicas=2)
        finally:  # otherwise the next test's service would keep these defaults
            upgraded = operators()
            system.install()
            eventually(lambda: operators() and not operators() & upgraded, 120, "the operator with its first values")
    load.assert_answered()
    assert seen.fewest == 2


def build_next(system: System, image: str) -> str:
    """Return the same programs in another image: what a later release would bring."""
    name = f"{image.rpartition('/')[2].partition(':')[0]}-next"
    return system.cluster.add_image(name, HERE / "images" / "Containerfile.next", [], base_image=image)


def image_of(pod: dict[str, Any]) -> str:
    """Return the image of the pod's first container, as its spec names it."""
    return str(pod["spec"]["containers"][0]["image"])
