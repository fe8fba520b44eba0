"""To zero and back: the first request after a rest is answered, held streams hear of it, and of a burst at zero nothing is lost."""

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.service import Service
from e2e.system import PATIENCE, System, eventually, finished

QUEUE = 40  # requests that each of the two routers may hold: a burst of 200 is more than both


@pytest.fixture(scope="module")
def service(installed: System) -> Iterator[Service]:
    service = Service(installed, "sleeper")
    scaling = {"minReplicas": 0, "maxReplicas": 1, "target": {"ttftMilliseconds": 2000}, "idleTimeoutSeconds": 15}
    installed.apply(service.manifest(scaling=scaling, routing={"args": [f"--max-queue-requests={QUEUE}", "--hold-keepalive=2"]}))
    service.ready(seconds=300)
    yield service
    service.delete()


@pytest.fixture
def asleep(service: Service) -> Service:
    def none() -> bool:
        condition = service.condition("Ready")
        return not service.pods() and service.status().get("desiredReplicas") == 0 and condition.get("reason") == "ScaledToZero"

    eventually(none, 180, "no worker")
    assert len(service.pods("router")) == 2, "routers stay, to receive the next request"
    return service


def burst(service: Service, count: int) -> dict[str, Any]:
    seconds = 300 * PATIENCE
    return finished(service.system.client("burst.py", service.url, service.name, str(count), str(seconds)), seconds=330)


def test_the_first_request_after_a_rest_is_answered_and_its_stream_is_kept_alive(asleep: Service) -> None:
    came = burst(asleep, 1)
    print(came)
    assert came["answered"] == 1 and came["lost"] == [] and came["told"] == 0, came
    assert came["streams_held"] == 1, "it waited, and was told so meanwhile"
    assert came["longest_silence"] < 15, "a comment every two seconds, on a machine that may be busy"
    asleep.ready(replicas=1)


def test_of_a_burst_at_zero_all_are_answered_or_told_when_to_come_again(asleep: Service) -> None:
    came = burst(asleep, 200)
    print(came)
    assert came["answered"] == 200 and came["lost"] == [], came
    assert came["told"] >= 200 - 2 * QUEUE, "the queues have room for 80 of 200"
    assert came["streams_held"] > 0
