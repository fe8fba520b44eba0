"""Faults while requests stream: a killed worker fails only its own open streams, and leaves the index."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.availability import is_ready
from e2e.service import Load, Service
from e2e.system import System, eventually

KILL_WORKER = """
import os, signal
for entry in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{entry}/cmdline", "rb").read().split(b"\\0")
    except OSError:
        continue
    if any(word.endswith(b"fairlead-worker") for word in words[:2]):
        os.kill(int(entry), signal.SIGKILL)
        print("killed", entry)
"""

INDEXED = """
import asyncio, json, sys
from fairlead_index.redis.access import RedisAccess
from fairlead_index.reader import IndexReader
async def main(url, namespace):
    reader = IndexReader(RedisAccess(url, "/etc/fairlead/redis"), namespace, deadline=1.0)
    print(json.dumps([{"pod": w.pod, "slot": w.slot} for w in await reader.workers()]))
    await reader.close()
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def service(installed: System) -> Iterator[Service]:
    """Two workers whose processes can be killed from inside their pod: a container's first process cannot kill itself."""
    service = Service(installed, "sturdy")
    with service.running(service.manifest(replicas=2, podTemplate={"spec": {"shareProcessNamespace": True}}), replicas=2):
        yield service


def indexed(service: Service) -> list[dict[str, Any]]:
    """Return the workers in the index, read with a router's credentials."""
    arguments = ["exec", "-n", service.system.models, f"deploy/{service.name}-router", "--", "python", "-c", INDEXED]
    url = f"rediss://{service.system.redis}:6379/0"
    out = service.system.cluster.kubectl(*arguments, url, f"{service.system.models}/{service.name}").stdout
    return json.loads(out.strip().splitlines()[-1])


def test_kill_9_of_a_worker_under_load(service: Service) -> None:
    victim = service.chat("Which worker will be killed?")["pod"]
    [slot] = [entry["slot"] for entry in indexed(service) if entry["pod"] == victim]
    with Load(service, concurrency=2) as load:
        killed = service.system.cluster.kubectl("exec", "-n", service.system.models, victim, "--", "python", "-c", KILL_WORKER)
        assert "killed" in killed.stdout
        at = time.monotonic()
        eventually(
            lambda: slot not in [entry["slot"] for entry in indexed(service) if entry["pod"] == victim],
            15,
            "the killed worker removed from the index",
        )
        assert time.monotonic() - at < 15
        later = Load(service, concurrency=2)
        with later:
            service.wait_ready(replicas=2)
    later.assert_answered()
    assert load.outcome["requests"] > 2 >= load.outcome["failed"], "at most the streams that were open on the killed worker"
    for failure in load.outcome["failures"]:
        assert failure["pod"] == victim, failure


def test_a_lost_redis_fails_no_request(service: Service) -> None:
    system = service.system
    redis = ["-n", system.namespace, "-l", "app.kubernetes.io/component=redis"]
    with Load(service, concurrency=2) as load:
        system.cluster.kubectl("delete", "pod", *redis, "--grace-period=0", "--force")
        answer = service.chat("Does routing work without an index?")
        assert answer["finish"] == "length"
        eventually(lambda: len(indexed(service)) == 2, 60, "both workers in the new, empty Redis")
    load.assert_answered()
    first = service.chat("Routing again. " * 20)
    eventually(lambda: service.chat("Routing again. " * 20)["predicted"] > 0, 30, "predictions from the rebuilt index")
    assert first["finish"] == "length"


@pytest.mark.long
def test_a_lost_index_is_reported_in_the_status_only(service: Service) -> None:
    redis = ["scale", "deployment/fairlead-redis", "-n", service.system.namespace]

    def index() -> Any:
        return service.status().get("index", {}).get("state")

    eventually(lambda: index() == "Available", 60, "the index, as a router sees it, in the status")
    service.system.cluster.kubectl(*redis, "--replicas=0")
    try:
        eventually(lambda: index() == "Unavailable", 60, "a router without requests reports the loss in the status")
        with Load(service, concurrency=2) as load:
            assert service.chat("Is there an index?")["finish"] == "length"
            eventually(lambda: service.condition("Ready")["status"] == "True" and service.status()["index"]["message"], 10, "still Ready")
        load.assert_answered()
    finally:
        service.system.cluster.kubectl(*redis, "--replicas=1")
    eventually(lambda: index() == "Available", 60, "the index is back in the status")


def test_router_pods_are_replaced_under_load(service: Service) -> None:
    with Load(service, concurrency=2) as load:
        for pod in service.pods("router"):
            service.system.cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", service.system.models, "--wait=true")
            eventually(
                lambda: all(is_ready(p) for p in service.pods("router")) and len(service.pods("router")) == 2, 120, "two routers ready"
            )
    load.assert_answered()
