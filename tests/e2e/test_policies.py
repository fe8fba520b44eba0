"""The nftables rules that e2e derives from NetworkPolicies, and keeps equal to them."""

import json
import subprocess
import time
from typing import Any

import pytest
from e2e.cluster.cluster import CommandFailed
from e2e.policies import PolicyEngine, derive_rules

from e2e import policies

NAMESPACES = [{"metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name}}} for name in ("models", "other")]
REFUSED = "reject with icmp type admin-prohibited"


def pod(name: str, address: str, namespace: str = "models", **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace, "labels": labels}, "spec": {}, "status": {"podIP": address}}


def policy(ingress: list[dict[str, Any]], **labels: str) -> dict[str, Any]:
    spec = {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"], "ingress": ingress}
    return {"metadata": {"name": "one", "namespace": "models"}, "spec": spec}


PODS = [pod("worker", "10.0.0.1", app="worker"), pod("router", "10.0.0.2", app="router"), pod("far", "10.0.0.3", "other", app="router")]


def lines(*policies: dict[str, Any]) -> list[str]:
    return [line.strip() for line in derive_rules(policies, PODS, NAMESPACES).splitlines()]


def test_a_pod_without_a_policy_is_open() -> None:
    assert not any(REFUSED in line for line in lines())


def test_a_peer_of_pods_means_those_of_the_own_namespace() -> None:
    ports = [{"protocol": "TCP", "port": 8000}]
    made = lines(policy([{"from": [{"podSelector": {"matchLabels": {"app": "router"}}}], "ports": ports}], app="worker"))
    assert "ip saddr { 10.0.0.2 } ip daddr 10.0.0.1 tcp dport 8000 accept" in made
    assert made.index(f"ip daddr {{ 10.0.0.1 }} {REFUSED}") == max(index for index, line in enumerate(made) if line.startswith("ip "))


def test_a_namespace_selector_opens_to_all_pods_there_and_no_from_to_everyone() -> None:
    there = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "other"}}}
    assert "ip saddr { 10.0.0.3 } ip daddr 10.0.0.1 accept" in lines(policy([{"from": [there]}], app="worker"))
    assert "ip daddr 10.0.0.1 tcp dport 80 accept" in lines(policy([{"ports": [{"port": 80}]}], app="worker"))


def test_peers_without_pods_and_no_rules_allow_nothing() -> None:
    nothing = {"podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["none"]}]}}
    for ingress in ([{"from": [nothing]}], []):
        assert [line for line in lines(policy(ingress, app="worker")) if line.startswith("ip ")] == [f"ip daddr {{ 10.0.0.1 }} {REFUSED}"]


class FlakyCluster:
    """Lists PODS and a policy, or fails while `fails` is set. `loaded`: the rules that nft got."""

    def __init__(self) -> None:
        self.fails, self.failures = False, 0
        self.policies: list[dict[str, Any]] = []
        self.loaded: list[str] = []

    def kubectl(self, *_: str, timeout: float) -> "subprocess.CompletedProcess[str]":
        if self.fails:
            self.failures += 1
            raise CommandFailed("connection refused")
        kinds = {"NetworkPolicy": self.policies, "Pod": PODS, "Namespace": NAMESPACES}
        items = [{**one, "kind": kind} for kind, listed in kinds.items() for one in listed]
        return subprocess.CompletedProcess([], 0, json.dumps({"items": items}), "")

    def exec_in_netns(self, _: list[str], *, input: str, **__: Any) -> "subprocess.CompletedProcess[str]":
        self.loaded.append(input)
        return subprocess.CompletedProcess([], 0, "", "")


def wait_until(check: Any) -> None:
    deadline = time.monotonic() + 10
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_rules_follow_policies_after_a_failed_read_and_are_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "PERIOD", 0.01)
    cluster = FlakyCluster()
    with PolicyEngine(cluster):  # type: ignore[arg-type]
        cluster.fails = True
        wait_until(lambda: cluster.failures >= 2)
        cluster.policies = [policy([], app="worker")]
        cluster.fails = False
        wait_until(lambda: REFUSED in cluster.loaded[-1])
    assert "chain" not in cluster.loaded[-1], "the table is only deleted"
