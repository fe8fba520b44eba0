"""Faults below Fairlead while requests stream: no API server for a minute, etcd restarted, the operator's clock wrong, Redis' disk full."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.cluster.cluster import LocalCluster
from e2e.cluster.local import LocalKubernetes
from e2e.service import Load, Service
from e2e.system import HERE, PATIENCE, System, eventually, image_values
from e2e.test_credentials import Redis

pytestmark = pytest.mark.long

OUTAGE = 60.0  # seconds
CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
LONGEST_GAP = 15.0 * PATIENCE  # seconds without an answer that a busy machine explains
DISK = "/data"
CLOCK_LIBRARY = "/usr/$LIB/faketime/libfaketimeMT.so.1"


@pytest.fixture(scope="module")
def service(installed: System) -> Iterator[Service]:
    service = Service(installed, "robust")
    with service.running(service.manifest(replicas=2, routing={"replicas": 1}), replicas=2):
        yield service


@pytest.fixture(scope="module")
def kubernetes(installed: System) -> LocalKubernetes:
    """The cluster's components, which only a cluster on this machine lets a test stop."""
    if not isinstance(installed.cluster, LocalCluster):
        pytest.skip("the control plane is not on this machine, so a test cannot stop it")
    return installed.cluster.kubernetes


def restarts(service: Service) -> dict[str, int]:
    """Return pod name → restarts, of all pods of the service."""
    pods = [*service.pods(), *service.pods("router")]
    return {pod["metadata"]["name"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods}


def assert_served(load: Load) -> None:
    """Fail if a request failed or had to wait."""
    load.assert_answered()
    print(f"{load.outcome['requests']} requests in {load.outcome['seconds']:.0f} s, longest gap {load.outcome['longest_gap']:.1f} s")
    assert load.outcome["longest_gap"] < LONGEST_GAP, load.outcome


def wait_for_operator(system: System) -> None:
    """Wait until a leader has renewed its lease once more."""

    def renewed() -> Any:
        return system.get("lease", "fairlead-operator", namespace=system.namespace)["spec"].get("renewTime")

    before = eventually(renewed, 180, "a lease")
    eventually(lambda: renewed() not in (None, before), 180, "a leading operator")


def change_routers(service: Service, replicas: int) -> None:
    """Add a router by an edit, and wait until the operator has done it.

    Removing one would end it before a controller manager that has just started tells kube-proxy.
    """
    service.system.apply(service.manifest(replicas=2, routing={"replicas": replicas}))

    def ready() -> int:
        routers = [pod["status"] for pod in service.pods("router")]
        return sum(each["status"] == "True" for status in routers for each in status.get("conditions", []) if each["type"] == "Ready")

    eventually(lambda: ready() == replicas, 180, f"{replicas} ready routers")
    service.wait_ready(replicas=2)


def test_a_minute_without_an_api_server_fails_no_request(service: Service, kubernetes: LocalKubernetes) -> None:
    pods, ready = restarts(service), service.condition("Ready")
    with Load(service, concurrency=2) as load:
        # The other two are stopped as well: on a real control plane they lose their leases and end.
        with kubernetes.without_components(*CONTROL_PLANE):
            time.sleep(OUTAGE)
        wait_for_operator(service.system)
        now = service.condition("Ready")
        assert (now["status"], now["lastTransitionTime"]) == ("True", ready["lastTransitionTime"]), (ready, now)
        assert restarts(service) == pods, "no pod of the service was restarted or replaced"
        change_routers(service, 2)
    assert load.outcome["seconds"] > OUTAGE
    assert_served(load)


def test_a_restarted_etcd_fails_no_request(service: Service, kubernetes: LocalKubernetes) -> None:
    pods = restarts(service)
    with Load(service, concurrency=2) as load:
        with kubernetes.without_components("etcd"):
            pass
        wait_for_operator(service.system)
        assert restarts(service) == pods, "no pod of the service was restarted or replaced"
        change_routers(service, 3)
    assert_served(load)


def test_a_full_disk_of_redis_fails_no_request(service: Service) -> None:
    """A Redis with an append-only file refuses writes when its disk is full. Reads go on."""
    system = service.system
    volume = {"name": "data", "emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}}
    mount = {"name": "data", "mountPath": DISK}
    redis = {"extraArgs": ["--dir", DISK, "--appendonly", "yes"], "extraVolumes": [volume], "extraVolumeMounts": [mount]}
    question = "Which blocks are stored? " * 40

    def predicted() -> int:
        return int(service.chat(question)["predicted"])

    def in_redis(script: str) -> str:
        home = ["-n", system.namespace, "deployment/fairlead-redis"]
        return system.cluster.kubectl("exec", *home, "--", "sh", "-c", script, check=False).stdout

    try:
        system.install(redis=redis)
        eventually(lambda: "appendonlydir" in in_redis(f"ls {DISK}"), 120, "a Redis with an append-only file")
        eventually(lambda: predicted() > 0, 90, "predictions from the new Redis")
        with Load(service, concurrency=2) as load:
            in_redis(f"cat /dev/zero > {DISK}/ballast")
            used = in_redis(f"df --output=avail {DISK} | tail -n 1").strip()
            assert used == "0", f"{used} KB are free"
            eventually(lambda: "MISCONF" in refused_write(system), 60, "a Redis that refuses writes")
            assert service.chat("Is the disk full?")["finish"] == "length"
            service.wait_ready(replicas=2)
            in_redis(f"rm {DISK}/ballast")
            eventually(lambda: "MISCONF" not in refused_write(system), 60, "a Redis that accepts writes again")
        load.assert_answered()
        new = "What was said after the disk had room again? " * 20
        eventually(lambda: service.chat(new)["predicted"] > 0, 90, "predictions for prompts from after the fault")
    finally:
        system.install()
    eventually(lambda: predicted() > 0, 90, "predictions from the first Redis")


def refused_write(system: System) -> str:
    """Write a key as the administrator, and return Redis' answer."""
    return Redis(system).command("SET", "fairlead-e2e-probe", "1", "EX", "1")


def test_an_operator_whose_clock_is_ten_minutes_off_manages_services(service: Service) -> None:
    system, before = service.system, {pod["metadata"]["uid"] for pod in service.pods()}
    new = Service(system, "timeless")
    try:
        with Load(service, concurrency=2) as load:
            set_operators_clock(system, "+10m")
            system.apply(new.manifest(replicas=1, routing={"replicas": 1}))
            new.wait_ready(replicas=1)
            assert new.condition("Degraded").get("status") != "True", new.status()
            assert new.chat("What time is it?")["finish"] == "length"
            set_operators_clock(system, "-10m")
            new.scale(2)
            new.wait_ready(replicas=2)
            assert new.condition("Degraded").get("status") != "True", new.status()
            service.wait_ready(replicas=2)
        load.assert_answered()
        assert {pod["metadata"]["uid"] for pod in service.pods()} == before, "no worker was replaced"
    finally:
        system.install()
        new.delete()


def set_operators_clock(system: System, offset: str) -> None:
    """Replace the operator by one whose clock is off by `offset`, as libfaketime writes it."""

    def operators() -> set[str]:
        listed = system.get("pods", "-l", "app.kubernetes.io/component=operator", namespace=system.namespace)["items"]
        return {pod["metadata"]["name"] for pod in listed}

    old, built = operators(), HERE / "images" / "Containerfile.clock"
    image = system.cluster.add_image("fairlead-control-clock", built, [], base_image=system.images.control)
    clock = {"LD_PRELOAD": CLOCK_LIBRARY, "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}
    images = system.image_values(system.images) | {"control": image_values(image)}
    system.install(images=images, operator={"extraEnv": [{"name": name, "value": value} for name, value in clock.items()]})
    eventually(lambda: operators() and not old & operators(), 120, "only the operator with the wrong clock")
    (pod,) = operators()
    ask = ["exec", "-n", system.namespace, pod, "--", "python", "-c", "import time; print(time.time())"]
    difference = float(system.cluster.kubectl(*ask).stdout) - time.time()
    assert 540 < difference * int(f"{offset[0]}1") < 660, f"its clock is off by {difference:.0f} s"
