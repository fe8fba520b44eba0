"""The real scheduler reads the constraint of docs/guides/pod-settings.md: it counts the service's workers, and an empty selector no pod."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.support import apiserver, controllers
from tests.operator.support.cluster import eventually
from tests.operator.support.manifests import SETTINGS, service

from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "pod-settings.md").read_text()
NOW = datetime(2026, 1, 1, tzinfo=UTC)
ZONE = "topology.kubernetes.io/zone"


def documented() -> dict[str, Any]:
    blocks = [one for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S) for one in yaml.safe_load_all(block)]
    (constraint,) = [one for block in blocks for one in pod_spec(block).get("topologySpreadConstraints", [])]
    return {**constraint, "whenUnsatisfiable": "DoNotSchedule"}  # a preference has no result that is certain


def pod_spec(manifest: Any) -> dict[str, Any]:
    return manifest.get("spec", {}).get("podTemplate", {}).get("spec", {})


def create_worker(server: apiserver.ApiServer, name: str, constraint: dict[str, Any]) -> None:
    """Create a pod as the worker's Deployment does."""
    qwen = service("qwen", podTemplate={"spec": {"topologySpreadConstraints": [constraint]}})
    made = desired(qwen, Observed(), SETTINGS, NOW).objects
    (template,) = [one["spec"]["template"] for one in made if (one["kind"], one["metadata"]["name"]) == ("Deployment", "qwen-worker")]
    metadata = {"name": name, "labels": template["metadata"]["labels"]}
    server.create(controllers.PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})


def placed(server: apiserver.ApiServer, name: str) -> str:
    """Return the pod's node, or why it has none; empty: the scheduler has not looked at it."""
    pod = server.get(f"{controllers.PODS}/{name}")
    refused = [one["message"] for one in pod["status"].get("conditions", []) if one["type"] == "PodScheduled" and one["status"] == "False"]
    return pod["spec"].get("nodeName") or "".join(refused)


def test_the_documented_constraint_keeps_workers_in_different_zones_and_an_empty_selector_does_not(tmp_path: Path) -> None:
    if problem := controllers.missing():
        pytest.skip(problem)
    with controllers.start(tmp_path) as server:
        for zone, gpus in (("a", 4), ("b", 0)):
            controllers.make_node(server, f"node-{zone}", gpus)
            controllers.patch(server, f"/api/v1/nodes/node-{zone}", {"metadata": {"labels": {ZONE: zone}}})
        for number in range(2):
            create_worker(server, f"empty-{number}", {**documented(), "labelSelector": {}})
            eventually(lambda number=number: placed(server, f"empty-{number}") == "node-a")
        for number in range(2):
            assert server.request("DELETE", f"{controllers.PODS}/empty-{number}", {"gracePeriodSeconds": 0})[0] == 200
        create_worker(server, "first", documented())
        eventually(lambda: placed(server, "first") == "node-a")
        create_worker(server, "second", documented())
        eventually(lambda: "didn't match pod topology spread constraints" in placed(server, "second"))  # zone b has no GPU
