"""A restart without changes writes nothing; changes made while no operator ran are reverted."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.operator.support import apiserver
from tests.operator.support.cluster import CHILDREN, Cluster, eventually
from tests.operator.support.manifests import manifest
from tests.operator.support.running_operator import StubRouter, run_operator

from fairlead_operator.kube.difference import is_unchanged, with_digest

SERVICES = 6
TEMPLATE = {
    "spec": {
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "containers": [{"name": "worker", "env": [{"name": "X", "value": "1"}]}, {"name": "side", "image": "s:1", "args": ["-v"]}],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
    }
}
SPEC = {"resources": {"cpu": "1000m", "memory": "1024Mi"}, "podTemplate": TEMPLATE}


def writes(server: apiserver.ApiServer, user: str, namespace: str) -> list[tuple[str, str]]:
    mine = [event for event in server.writes(user) if event["objectRef"].get("namespace") == namespace]
    return [(event["verb"], event["requestURI"]) for event in mine if event["objectRef"]["resource"] not in ("leases", "events")]


def versions(cluster: Cluster, names: list[str]) -> dict[str, str]:
    plurals = sorted({plural for plural, _ in CHILDREN} | {"controllerrevisions", "inferenceservices"})
    listed = [item for plural in plurals for item in cluster.server.get(cluster.path(plural))["items"]]
    return {item["metadata"]["uid"]: item["metadata"]["resourceVersion"] for item in listed}


def test_a_restart_with_nothing_to_do_writes_nothing(
    server: apiserver.ApiServer, namespace: str, router: StubRouter, tmp_path: Path
) -> None:
    cluster = Cluster(server, namespace)
    names = [f"s{number}" for number in range(SERVICES)]
    for name in names:
        server.create(cluster.path("inferenceservices"), manifest(name, namespace, **SPEC))

    def settled() -> bool:
        return all((cluster.get("inferenceservices", name).get("status") or {}).get("conditions") for name in names)

    first, second = (server.kubeconfig_of(user, tmp_path) for user in ("operator-a", "operator-b"))
    with run_operator(first, namespace, router.url):
        eventually(settled, within=60)
    before = versions(cluster, names)
    assert len(before) == SERVICES * (len(CHILDREN) + 3), "children, two revisions and the service"
    with run_operator(second, namespace, router.url):
        # A pass is seen by its effect: the last service is new, and loops start in the order of the list.
        server.create(cluster.path("inferenceservices"), manifest("zz", namespace, **SPEC))
        eventually(lambda: (cluster.get("inferenceservices", "zz").get("status") or {}).get("conditions"), within=60)
        for name in names:
            cluster.patch("deployments", f"{name}-worker", {"metadata": {"annotations": {"others": "own"}}})
        server.create(cluster.path("inferenceservices"), manifest("zzz", namespace, **SPEC))
        eventually(lambda: (cluster.get("inferenceservices", "zzz").get("status") or {}).get("conditions"), within=60)
    others = [(verb, uri.partition("?")[0].rpartition("/")[2]) for verb, uri in writes(server, "operator-b", namespace) if "/zz" not in uri]
    assert others == [("create", "secrets")] * 2, "of zz and zzz: a create has no name in its path"
    after = versions(cluster, names)
    assert sum(after[uid] != version for uid, version in before.items()) == SERVICES, "our test's own annotation"


CHANGES: dict[str, tuple[str, str, dict[str, Any]]] = {  # of one service each
    "size": ("deployments", "size-worker", {"spec": {"replicas": 5}}),
    "label": ("deployments", "label-worker", {"metadata": {"labels": {"app.kubernetes.io/component": None}}}),
    "field": ("deployments", "field-worker", {"spec": {"template": {"spec": {"nodeSelector": None}}}}),
    "bounds": ("deployments", "bounds-router", {"spec": {"strategy": {"rollingUpdate": {"maxSurge": 2}}}}),
    "selector": ("services", "selector", {"spec": {"selector": {"app.kubernetes.io/component": "worker"}}}),
    "budget": ("poddisruptionbudgets", "budget-worker", {"spec": {"maxUnavailable": 0}}),
    "account": ("serviceaccounts", "account", {"automountServiceAccountToken": True}),
    "digest": ("serviceaccounts", "digest", {"metadata": {"annotations": {"fairlead.dev/applied": None}}}),
}


def test_changes_made_while_no_operator_ran_are_reverted(server: apiserver.ApiServer, namespace: str, router: StubRouter) -> None:
    cluster = Cluster(server, namespace)
    for service in CHANGES:
        server.create(cluster.path("inferenceservices"), manifest(service, namespace, **SPEC))
    with run_operator(server.kubeconfig, namespace, router.url):
        before = {service: eventually(lambda at=at: cluster.get(*at[:2])) for service, at in CHANGES.items()}
    for at in CHANGES.values():
        cluster.patch(*at)
    with run_operator(server.kubeconfig, namespace, router.url):
        for service, (plural, name, change) in CHANGES.items():
            wanted = cut(before[service], change)
            eventually(lambda at=(plural, name), change=change, wanted=wanted: cut(cluster.get(*at), change) == wanted)


def cut(body: Any, change: Mapping[str, Any]) -> Any:
    """The fields of `body` that `change` names."""
    return {key: cut(body.get(key) or {}, inner) if isinstance(inner, dict) else body.get(key) for key, inner in change.items()}


def left_as(desired: dict[str, Any], fields: Any) -> dict[str, Any]:
    live = copy.deepcopy(with_digest(desired))
    entry = {"manager": "fairlead-operator", "operation": "Apply", "fieldsV1": json.dumps(fields)}
    live["metadata"] |= {"uid": "u", "managedFields": [entry]}
    return live


def test_ownership_is_read_item_by_item() -> None:
    spec = {"ports": [{"port": 80, "protocol": "TCP", "name": "http"}], "args": ["a"], "set": ["x"]}
    desired = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a", "namespace": "n", "labels": {"l": "1"}}, "spec": spec}
    port = {".": {}, "f:port": {}, "f:protocol": {}, "f:name": {}}
    fields: dict[str, Any] = {
        "f:metadata": {"f:labels": {"f:l": {}}, "f:annotations": {"f:fairlead.dev/applied": {}}},
        "f:spec": {"f:ports": {'k:{"port":80,"protocol":"TCP"}': port}, "f:args": {}, "f:set": {'v:"x"': {}}},
    }
    assert is_unchanged(desired, left_as(desired, fields))
    for path in (
        ["f:metadata", "f:labels"],
        ["f:spec", "f:set", 'v:"x"'],
        ["f:spec", "f:ports", 'k:{"port":80,"protocol":"TCP"}', "f:name"],
    ):
        lost = copy.deepcopy(fields)
        node = lost
        for name in path[:-1]:
            node = node[name]
        del node[path[-1]]
        if not node:
            node['v:"y"'] = {}  # an empty node would stand for the whole
        assert not is_unchanged(desired, left_as(desired, lost)), path
    assert not is_unchanged({**desired, "spec": {**spec, "args": ["b"]}}, left_as(desired, fields))
