"""Merging a podTemplate: a field of which an item may have only one replaces the other one."""

from typing import Any

import pytest

from fairlead_operator.kube.merge import merge

SECRET = {"secretKeyRef": {"name": "own", "key": "k"}}
GET = {"httpGet": {"path": "/ready"}, "periodSeconds": 2}


@pytest.mark.parametrize(
    ("ours", "theirs", "merged"),
    [
        (
            {"env": [{"name": "A", "value": "x"}]},
            {"env": [{"name": "A", "valueFrom": SECRET}]},
            {"env": [{"name": "A", "valueFrom": SECRET}]},
        ),
        ({"env": [{"name": "A", "valueFrom": SECRET}]}, {"env": [{"name": "A", "value": "x"}]}, {"env": [{"name": "A", "value": "x"}]}),
        ({"env": [{"name": "A", "value": "x"}]}, {"env": [{"name": "A"}]}, {"env": [{"name": "A", "value": "x"}]}),
        (
            {"volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}]},
            {"volumes": [{"name": "tmp", "hostPath": {"path": "/scratch"}}]},
            {"volumes": [{"name": "tmp", "hostPath": {"path": "/scratch"}}]},
        ),
        (
            {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]},
            {"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "8Gi"}}]},
            {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}]},
        ),
        (
            {"readinessProbe": GET},
            {"readinessProbe": {"exec": {"command": ["a"]}}},
            {"readinessProbe": {"exec": {"command": ["a"]}, "periodSeconds": 2}},
        ),
        ({"readinessProbe": GET}, {"readinessProbe": {"periodSeconds": 9}}, {"readinessProbe": GET | {"periodSeconds": 9}}),
    ],
)
def test_one_choice_replaces_the_other_without_null(ours: Any, theirs: Any, merged: Any) -> None:
    assert merge(ours, theirs) == merged
