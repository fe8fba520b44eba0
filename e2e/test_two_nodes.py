"""Workers on two nodes, and the loss of one: its streams fail, the other node serves, and the status says what is missing."""

from collections.abc import Iterator

import pytest

from e2e.cluster.cluster import LocalCluster
from e2e.cluster.second_node import NAME, SecondNode
from e2e.service import Load, Service
from e2e.system import System, eventually

pytestmark = pytest.mark.long

TAINT = "fairlead-e2e"  # keeps routers away from the second node: kube-proxy needs a minute to forget endpoints of a lost node


@pytest.fixture
def second(installed: System) -> Iterator[SecondNode]:
    if not isinstance(installed.cluster, LocalCluster):
        pytest.skip("the nodes are not on this machine, so a test cannot end one")
    node = SecondNode(installed.cluster.kubernetes)
    try:
        node.start()
        installed.cluster.kubectl("taint", "node", NAME, f"{TAINT}=:NoSchedule", "--overwrite")
        yield node
    finally:
        node.remove()


@pytest.fixture
def service(installed: System, second: SecondNode) -> Iterator[Service]:
    """One worker on each node. A worker of an unreachable node is replaced after 5 s instead of Kubernetes' 300 s."""
    service = Service(installed, "spread")
    lost = [f"node.kubernetes.io/{name}" for name in ("unreachable", "not-ready")]
    tolerations = [{"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5} for key in lost]
    spec = {"tolerations": [{"key": TAINT, "operator": "Exists"}, *tolerations]}
    with service.running(service.manifest(replicas=2, podTemplate={"spec": spec}), replicas=2):
        yield service


def test_a_lost_node_fails_only_its_own_streams_and_its_worker_is_replaced(service: Service, second: SecondNode) -> None:
    places = {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in service.pods()}
    assert len(places) == 2, "one worker on each node"
    lost = places[NAME]
    with Load(service, concurrency=4, max_tokens=96) as load:
        eventually(lambda: service.chat("Which node answers?")["pod"] == lost, 30, "an answer from the second node")
        second.lose()
        eventually(lambda: service.status().get("readyReplicas") == 1, 120, "one ready replica in the status")
        assert service.condition("Ready")["status"] == "True", "the other node serves"
        with Load(service, concurrency=2) as later:
            eventually(lambda: lost not in [pod["metadata"]["name"] for pod in service.pods()], 60, "the lost worker given up")
            service.wait_ready(replicas=2)
    later.assert_answered()
    assert {pod["spec"]["nodeName"] for pod in service.pods()} == places.keys() - {NAME}, "both on the node that is left"
    assert load.outcome["requests"] > 8 and load.outcome["failed"] <= 4, load.outcome["failures"]
    assert {failure["pod"] for failure in load.outcome["failures"]} <= {lost}, load.outcome["failures"]
    print(f"{load.outcome['failed']} streams of the lost node failed, longest gap {load.outcome['longest_gap']:.0f} s")
