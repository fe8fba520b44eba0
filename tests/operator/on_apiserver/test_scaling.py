"""The operator's autoscaler and external ones, on a real API server: real routers hold the requests, the tests simulate the kubelet."""

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.operator.scaling.test_scaling import page, worker
from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster, eventually
from tests.operator.support.manifests import manifest
from tests.operator.support.running_operator import StubRouter, run_operator
from tests.servers.redis_server import free_port
from tests.system.processes import Process, fetch, until

from fairlead_operator.polling import demand as demand_watch
from fairlead_operator.scaling.costs import ANNOTATION

READY = {"phase": "Running", "podIP": "10.0.0.7", "podIPs": [{"ip": "10.0.0.7"}], "conditions": [{"type": "Ready", "status": "True"}]}
SCALE = "application/json"


class Zero:
    """A real router without workers, and a worker that the test starts when the operator wants one."""

    def __init__(self, folder: Path) -> None:
        self.listed = folder / "workers"
        self.listed.write_text("")
        port, self._worker_port = free_port(), free_port()
        flags = ["--host", "127.0.0.1", "--port", str(port), "--workers", f"file://{self.listed}", "--policy", "LeastLoad"]
        flags += ["--poll-interval", "0.1", "--hold-timeout", "60", "--ready-without-workers"]
        self.router = Process("router", [sys.executable, "-m", "fairlead_router.main", *flags], folder / "router.log")
        command = [sys.executable, "-m", "tests.system.worker_process", "--port", str(self._worker_port), "--pod-name", "pod-0"]
        self.worker = Process("pod-0", command, folder / "pod-0.log")
        self.url = f"http://127.0.0.1:{port}"

    def start_router(self) -> None:
        self.router.start()
        until(lambda: fetch(f"{self.url}/ready") is not None, "a router without workers is ready")

    def start_worker(self) -> None:
        self.worker.start()
        self._list(f"127.0.0.1:{self._worker_port}\n")

    def end_worker(self) -> None:
        self._list("")
        self.worker.kill()

    def _list(self, text: str) -> None:
        fresh = self.listed.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.listed)


@pytest.fixture
def zero(tmp_path: Path) -> Iterator[Zero]:
    made = Zero(tmp_path)
    made.start_router()
    yield made
    made.router.kill()
    made.worker.kill()


def replicas(cluster: Cluster) -> int:
    return int(eventually(lambda: cluster.get("deployments", "qwen-worker"))["spec"]["replicas"])


def events(cluster: Cluster, reason: str) -> list[str]:
    return [event["message"] for event in cluster.server.get(cluster.path("events"))["items"] if event["reason"] == reason]


async def _burst(url: str, count: int) -> list[tuple[int, str]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:

        async def one(number: int) -> tuple[int, str]:
            body = {"prompt": f"hello {number}", "max_tokens": 3, "stream": number % 2 == 0}
            answer = await client.post("/v1/completions", json=body)
            return answer.status_code, answer.text

        return list(await asyncio.gather(*(one(number) for number in range(count))))


async def test_to_zero_and_a_burst_of_200_brings_it_back_through_a_restart_of_router_and_operator(
    server: apiserver.ApiServer, namespace: str, zero: Zero, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand_watch, "BUSY_PERIOD", 0.3)
    cluster = Cluster(server, namespace)

    def until_zero() -> None:
        eventually(lambda: replicas(cluster) == 0)
        cluster.play_controllers()
        eventually(lambda: (cluster.ready().get("status"), cluster.ready().get("reason")) == ("True", "Asleep"))
        assert cluster.condition("Available")["reason"] == "Asleep"
        assert cluster.condition("Available")["status"] == cluster.condition("Routable")["status"] == "True"

    def asleep() -> None:
        with run_operator(server.kubeconfig, namespace, zero.url):
            cluster.create(scaling={"minReplicas": 0, "maxReplicas": 4, "target": {"ttftMilliseconds": 2000}, "idleTimeoutSeconds": 2})
            assert replicas(cluster) == 1, "the first worker shows that the service serves"
            cluster.play_controllers(workers_ready=False)  # else the operator's own completion is held, too
            cluster.play_kubelet("qwen-router-x", READY, "router")
            cluster.play_kubelet("qwen-worker-x", READY)  # before it is ready it is not taken away
            until_zero()
            scaling = cluster.get("inferenceservices", "qwen")["status"]["scaling"]
            assert scaling["desiredReplicas"] == 0 and re.fullmatch(r"no request for \d+s: 1 -> 0", scaling["message"]), scaling
            assert eventually(lambda: events(cluster, "Scaled")) == [scaling["message"]]
            eventually(lambda: cluster.get("inferenceservices", "qwen")["status"].get("index"))
            seen: list[list[str]] = []

            def nothing_is_written() -> bool:
                objects = (cluster.get("inferenceservices", "qwen"), cluster.get("deployments", "qwen-worker"))
                seen.append([one["metadata"]["resourceVersion"] for one in objects])
                time.sleep(1.0)  # the absence of a write can only be waited for
                return len(seen) > 1 and seen[-1] == seen[-2]

            eventually(nothing_is_written)

    await asyncio.to_thread(asleep)
    await asyncio.to_thread(zero.router.kill)
    await asyncio.to_thread(zero.start_router)
    burst = asyncio.create_task(_burst(zero.url, 200))

    def awake() -> float:
        until(lambda: (fetch(f"{zero.url}/fairlead/demand") or {}).get("active") == 200, "all are held while no operator runs")
        with run_operator(server.kubeconfig, namespace, zero.url):
            eventually(lambda: replicas(cluster) >= 1)
            eventually(lambda: "200 requests wait for a worker: 0 -> 1" in events(cluster, "Scaled"))
            zero.start_worker()
            cluster.play_controllers()
            until(burst.done, "the burst is answered")
            zero.end_worker()
            until_zero()
            began = time.monotonic()
            with httpx.Client(base_url=zero.url, timeout=0.2, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json={"prompt": "again", "max_tokens": 1})
            eventually(lambda: replicas(cluster) == 1)
            return time.monotonic() - began

    woken = await asyncio.to_thread(awake)
    answers = await burst
    assert {status for status, _ in answers} == {200}, [text for status, text in answers if status != 200][:3]
    assert all("[DONE]" in text for _, text in answers[::2]), "streams are whole"
    print(f"request -> Deployment: {woken:.2f} s")
    assert woken < 10, "the operator is told, it does not come by to ask"


@pytest.fixture
def cluster(server: apiserver.ApiServer, namespace: str, router: StubRouter, tmp_path: Path) -> Iterator[Cluster]:
    kubeconfig = server.kubeconfig_of("operator-a", tmp_path)
    with run_operator(kubeconfig, namespace, router.url):
        yield Cluster(server, namespace)


def test_pods_get_their_deletion_costs_before_a_scale_down(cluster: Cluster, router: StubRouter) -> None:
    cluster.create(replicas=3)
    cluster.play_controllers()
    cluster.play_kubelet("qwen-router-x", READY, "router")
    for name in ("qwen-worker-a", "qwen-worker-b", "qwen-worker-c"):
        cluster.play_kubelet(name, {"phase": "Running"})
    versions = [cluster.get("pods", f"qwen-worker-{name}")["metadata"]["resourceVersion"] for name in "abc"]
    eventually(lambda: cluster.ready().get("status") == "True")
    cluster.patch("inferenceservices", "qwen", {"spec": {"replicas": 4}}, "scale")
    eventually(lambda: replicas(cluster) == 4)
    assert [cluster.get("pods", f"qwen-worker-{name}")["metadata"]["resourceVersion"] for name in "abc"] == versions, "only when fewer"
    seen = [worker("qwen-worker-a", hit_tokens=5000, unique_share=0.5), worker("qwen-worker-b", running=2)]
    router.demand = page(seen)
    cluster.patch("inferenceservices", "qwen", {"spec": {"replicas": 2}}, "scale")
    eventually(lambda: replicas(cluster) == 2)
    pods = {name: cluster.get("pods", f"qwen-worker-{name}")["metadata"] for name in "abc"}
    assert {name: pod["annotations"][ANNOTATION] for name, pod in pods.items()} == {"a": "2500", "b": "512", "c": "0"}
    smaller = int(cluster.get("deployments", "qwen-worker")["metadata"]["resourceVersion"])
    assert max(int(pod["resourceVersion"]) for pod in pods.values()) < smaller
    router.demand = None
    cluster.patch("inferenceservices", "qwen", {"spec": {"replicas": 1}}, "scale")
    eventually(lambda: replicas(cluster) == 1)


def test_an_autoscaler_on_scale_is_not_fought(cluster: Cluster, server: apiserver.ApiServer) -> None:
    """What an HPA does: GET and PUT of /scale, by the selector and the counts that it finds there."""
    cluster.create(scaling={"minReplicas": 1, "maxReplicas": 6})
    cluster.play_controllers()
    path = cluster.path("inferenceservices", "qwen", "scale")
    before = len(server.writes("operator-a"))
    for wanted, made in ((2, 2), (5, 5), (0, 1), (9, 6), (4, 4)):  # within the bounds of spec.scaling
        while True:
            scale = cluster.server.get(path)
            scale["spec"]["replicas"] = wanted
            code, answer = cluster.server.request("PUT", path, scale, SCALE)
            if code != 409:  # the status was written meanwhile: an HPA reads again, too
                break
        assert code == 200, answer
        eventually(lambda made=made: replicas(cluster) == made)
        cluster.play_controllers()
        eventually(lambda made=made: cluster.server.get(path)["status"].get("replicas") == made)
        assert cluster.server.get(path)["spec"].get("replicas", 0) == wanted
    selector = cluster.server.get(path)["status"]["selector"]
    assert "app.kubernetes.io/component=worker" in selector and selector.endswith(",fairlead.dev/track notin (canary)"), selector
    scaled = cluster.server.kubectl("scale", "inferenceservices.fairlead.dev/qwen", "--replicas=2", "-n", cluster.namespace)
    assert scaled.returncode == 0, f"the selector must be one that clients of /scale can read: {scaled.stderr}"
    service = cluster.get("inferenceservices", "qwen")
    ours = [entry for entry in service["metadata"]["managedFields"] if entry["manager"] == "fairlead-operator"]
    assert all(entry["subresource"] == "status" for entry in ours), "the operator never writes a service's spec"
    eventually(lambda: cluster.ready().get("status") == "True")
    writes = [event["objectRef"] for event in server.writes("operator-a")[before:] if event["objectRef"]["namespace"] == cluster.namespace]
    assert sum(one["resource"] == "deployments" for one in writes) <= 2 + 5, "one write for each size"


def test_our_own_scaling_follows_the_routers_reports(cluster: Cluster, router: StubRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_watch, "BUSY_PERIOD", 0.1)
    monkeypatch.setattr(demand_watch, "RETRY_LONGEST", 0.2)
    monkeypatch.setattr("fairlead_operator.scaling.decision.WINDOW", 0.5)
    busy = {"active": 9, "requests_per_second": 40.0, "prompt_tokens_per_second": 20_000.0, "prefill_rate": 6000.0}
    router.demand = page([worker("qwen-worker-a", backlog_tokens=50_000)], **busy)
    cluster.create(
        scaling={"minReplicas": 1, "maxReplicas": 4, "target": {"ttftMilliseconds": 2000}, "scaleDown": {"stabilizationWindowSeconds": 1}}
    )
    cluster.play_controllers()
    cluster.play_kubelet("qwen-router-x", READY, "router")
    eventually(lambda: replicas(cluster) == 4)
    said = eventually(lambda: events(cluster, "Scaled"))
    assert len(said) == 1 and said[0].startswith("expected TTFT 8.4s over target 2s") and said[0].endswith(": 1 -> 4")
    assert cluster.get("inferenceservices", "qwen")["spec"]["replicas"] == 1, "nothing is stored on the service"
    eventually(
        lambda: cluster.get("inferenceservices", "qwen")["status"]["scaling"] == {"desiredReplicas": 4, "message": said[0], "schedule": ""}
    )
    cluster.play_controllers()
    router.demand = None
    silent = router.demands
    eventually(lambda: router.demands >= silent + 1)
    time.sleep(1.5)  # longer than the stabilization
    assert replicas(cluster) == 4, "a router that does not answer never scales down"
    router.demand = page([worker("qwen-worker-a")], active=1, prefill_rate=6000.0)
    eventually(lambda: replicas(cluster) == 1)
    cluster.patch("deployments", "qwen-worker", {"spec": {"replicas": 9}})
    eventually(lambda: replicas(cluster) <= 4, within=5)


def test_a_manifest_edited_from_replicas_to_a_target_goes_on_from_the_size_that_it_has(cluster: Cluster, router: StubRouter) -> None:
    cluster.create(replicas=3)
    eventually(lambda: replicas(cluster) == 3)
    edited = manifest("qwen", cluster.namespace, scaling={"maxReplicas": 8, "target": {"ttftMilliseconds": 2000}})["spec"]
    cluster.patch("inferenceservices", "qwen", {"spec": {**edited, "replicas": None}})
    eventually(lambda: (cluster.get("inferenceservices", "qwen").get("status") or {}).get("scaling"))
    assert replicas(cluster) == 3
    path = cluster.path("inferenceservices", "qwen", "scale")
    scale = cluster.server.get(path)
    scale["spec"]["replicas"] = 5
    code, answer = cluster.server.request("PUT", path, scale, SCALE)
    assert code == 422 and "spec.replicas and spec.scaling.target both set" in json.dumps(answer)
