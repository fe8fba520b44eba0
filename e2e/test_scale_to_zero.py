"""Scale to zero and back: the first request is answered, held streams are kept alive, and no request of a burst is lost."""

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.service import Service
from e2e.system import PATIENCE, System, eventually, read_result

QUEUE = 40  # requests that each of the two routers may hold: a burst of 200 is more than both


@pytest.fixture(scope="module")
def service(installed: System) -> Iterator[Service]:
    service = Service(installed, "scaled")
    scaling = {"minReplicas": 0, "maxReplicas": 1, "target": {"ttftMilliseconds": 2000}, "idleTimeoutSeconds": 15}
    with service.running(service.manifest(scaling=scaling, routing={"args": [f"--max-queue-requests={QUEUE}"]})):
        yield service


@pytest.fixture
def at_zero(service: Service) -> Service:
    def has_no_worker() -> bool:
        condition = service.condition("Ready")
        asleep = (condition.get("status"), condition.get("reason")) == ("True", "Asleep")
        return not service.pods() and service.status().get("desiredReplicas") == 0 and asleep

    eventually(has_no_worker, 180, "no worker")
    assert len(service.pods("router")) == 2, "routers stay, to receive the next request"
    return service


def burst(service: Service, count: int) -> dict[str, Any]:
    seconds = 300 * PATIENCE
    return read_result(service.system.client("burst.py", service.url, service.name, str(count), str(seconds)), seconds=330)


def test_the_first_request_at_zero_is_answered_and_its_stream_is_kept_alive(at_zero: Service) -> None:
    result = burst(at_zero, 1)
    print(result)
    assert result["answered"] == 1 and result["failed"] == [] and result["refused"] == 0, result
    assert result["streams_held"] == 1, "it waited, and its stream got comments meanwhile"
    assert result["longest_silence"] < 15, "a comment every five seconds, on a machine that may be busy"
    at_zero.wait_ready(replicas=1)


def test_a_burst_at_zero_is_answered_or_gets_retry_after(at_zero: Service) -> None:
    result = burst(at_zero, 200)
    print(result)
    assert result["answered"] == 200 and result["failed"] == [], result
    assert result["refused"] >= 200 - 2 * QUEUE, "the queues have room for 80 of 200"
    assert result["streams_held"] > 0
