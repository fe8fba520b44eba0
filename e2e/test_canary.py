"""A canary beside real workers: one that crashes is rolled back, and a sound one is promoted to all pods."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.availability import Availability
from e2e.service import Load, Service
from e2e.system import PATIENCE, System, eventually
from e2e.test_faults import KILL_WORKER

pytestmark = pytest.mark.long

NEVER = 3600  # seconds of analysis: longer than the test


def rollout(analysis: int) -> dict[str, Any]:
    """Return a canary with half of the conversations. Times on a busy machine say nothing, so only errors decide."""
    limits = {"minRequests": 10, "maxErrorRateIncrease": "0.1%", "maxTTFTIncrease": "9999%"}
    return {"canary": {"trafficPercent": 50, "analysisSeconds": analysis, **limits}}


@pytest.fixture(scope="module")
def service(installed: System) -> Iterator[Service]:
    service = Service(installed, "tried")
    with service.running(manifest(service, 32, NEVER), replicas=1):
        yield service


def manifest(service: Service, seats: int, analysis: int) -> dict[str, Any]:
    """Return the service with a revision for each number of seats. Its workers' processes can be killed from inside their pod."""
    shared = {"spec": {"shareProcessNamespace": True}}
    return service.manifest(engine={"maxNumSeqs": seats}, rollout=rollout(analysis), podTemplate=shared, replicas=1)


def canaries(service: Service) -> list[str]:
    return [pod["metadata"]["name"] for pod in service.pods() if pod["metadata"]["labels"].get("fairlead.dev/track") == "canary"]


def phase(service: Service) -> str | None:
    return service.status().get("canary", {}).get("phase")


@contextmanager
def open_stream(service: Service, pod: str) -> Iterator["subprocess.Popen[str]"]:
    """Start long chats until one streams from `pod`, and provide that one. The others go on until the end of the block."""
    clients: list[subprocess.Popen[str]] = []
    try:
        for number in range(20):
            stream = service.system.client("chat.py", service.url, service.name, f"Which side answers chat {number}?", "1500")
            clients.append(stream)
            assert stream.stderr is not None
            if stream.stderr.readline().split()[-1:] == [pod]:
                break
        else:
            raise AssertionError(f"none of 20 chats went to {pod}")
        yield stream
    finally:
        for client in clients:
            client.kill()
            client.communicate()


def test_a_canary_that_crashes_is_rolled_back_and_fails_only_its_own_streams(service: Service) -> None:
    system = service.system
    (old,) = [pod["metadata"]["uid"] for pod in service.pods()]
    with Load(service, concurrency=4) as load, Availability(service) as seen:
        system.apply(manifest(service, 33, NEVER))
        eventually(lambda: phase(service) == "Analyzing", 180, "a canary under analysis")
        (canary,) = canaries(service)
        eventually(lambda: " requests 0 failed" in json.dumps(service.status()), 60, "requests to the canary in the status")
        with open_stream(service, canary) as stream:
            killed = system.cluster.kubectl("exec", "-n", system.models, canary, "--", "python", "-c", KILL_WORKER)
            assert "killed" in killed.stdout
            assert stream.wait(60 * PATIENCE) != 0, "the killed worker's stream ends with an error"
            eventually(lambda: phase(service) == "Failed", 180, "the canary rolled back")
            eventually(lambda: canaries(service) == [], 60, "no pod of the canary")
    assert load.outcome["by_pod"][canary] >= 5, "about half of the conversations went to the canary"
    assert load.outcome["failed"] <= 4 < load.outcome["requests"], "at most the open streams"
    assert {failure["pod"] for failure in load.outcome["failures"]} <= {canary}
    assert [pod["metadata"]["uid"] for pod in service.pods()] == [old] and seen.fewest == 1, "no pod of the old revision was touched"
    degraded = service.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "CanaryFailed"), degraded
    assert "failed" in degraded["message"] and "retryToken" in degraded["message"], degraded
    assert service.condition("Available")["status"] == "True"
    with Load(service, concurrency=2) as later:
        assert service.chat("Who serves after the rollback?")["pod"] == service.pods()[0]["metadata"]["name"]
    later.assert_answered()


def test_a_sound_canary_is_promoted_to_all_pods_under_load(service: Service) -> None:
    old = {pod["metadata"]["name"] for pod in service.pods()}
    with Load(service, concurrency=4, max_tokens=48) as load, Availability(service) as seen:
        service.system.apply(manifest(service, 34, 5))
        eventually(lambda: phase(service) == "Analyzing", 180, "a canary under analysis")
        (canary,) = canaries(service)
        eventually(lambda: not canaries(service) and not old & {pod["metadata"]["name"] for pod in service.pods()}, 240, "only new pods")
        service.wait_ready(replicas=1)
    load.assert_answered()
    assert load.outcome["by_pod"][canary] >= 10, "the canary served before it was promoted"
    assert seen.fewest == 1
    (pod,) = service.pods()
    assert "--max-num-seqs=34" in pod["spec"]["containers"][0]["args"]
    assert service.condition("Degraded").get("status") != "True" and phase(service) in (None, "")
