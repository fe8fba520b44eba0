"""`spec.scaling` in local mode: there is no autoscaler, so the initial number of workers runs."""

import json
from typing import Any

import pytest
from tests.operator.support.manifests import service

from fairlead.local.manifest import objects_of


@pytest.mark.parametrize(
    ("scaling", "replicas", "runs"),
    [
        ({"minReplicas": 0, "maxReplicas": 4, "target": {"ttftMilliseconds": 2000}, "idleTimeoutSeconds": 300}, 1, 1),
        ({"minReplicas": 3, "maxReplicas": 4, "target": {"ttftMilliseconds": 2000}}, 1, 3),
        ({"minReplicas": 0, "maxReplicas": 4}, 0, 0),
        ({"minReplicas": 1, "maxReplicas": 2}, 7, 2),
    ],
    ids=json.dumps,
)
def test_workers_of_a_service_with_scaling(scaling: dict[str, Any], replicas: int, runs: int) -> None:
    made = objects_of(service(scaling=scaling, replicas=replicas), redis_url="redis://x")
    counts = {one["metadata"]["name"]: one["spec"]["replicas"] for one in made if one["kind"] == "Deployment"}
    assert counts["qwen-worker"] == runs
