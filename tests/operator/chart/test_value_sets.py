"""Many sets of values: a real API server and kubeconform accept what the chart makes of each."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tests.operator.chart.test_schemas import check, schemas
from tests.operator.support import apiserver
from tests.operator.support.chart import CHART, helm, load

__all__ = ["schemas"]  # the fixture

TAINTS = {"tolerations": [{"key": "dedicated", "operator": "Equal", "value": "1", "effect": "NoSchedule"}], "nodeSelector": {"pool": "1e3"}}
LIMITS = {"resources": {"requests": {"cpu": 0.5, "memory": "128Mi"}, "limits": {"cpu": 1, "memory": "512Mi", "ephemeral-storage": "1Gi"}}}
LABELS = {"podLabels": {"team": "123", "cost": "true", "tier": "0x1f"}, "podAnnotations": {"a": "1e3", "b": "null", "c": "- x: y"}}
SPREAD = {
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": []}]}}},
    "priorityClassName": "system-cluster-critical",
}
PODS = {"taints": TAINTS, "limits": LIMITS, "labels": LABELS, "spread": SPREAD, "all": {**TAINTS, **LIMITS, **LABELS, **SPREAD}}
SECTIONS = ("operator", "redis", "test")
EXTRA = {
    "extraArgs": ["--log-level=DEBUG"],
    "extraEnv": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
    "extraVolumes": [{"name": "extra", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
}
SETS: dict[str, dict[str, Any]] = {
    **{f"{section}-{name}": {section: pods} for section, (name, pods) in itertools.product(SECTIONS, PODS.items())},
    **{f"openshift-{name}": {"openshift": True, **dict.fromkeys(SECTIONS, pods)} for name, pods in PODS.items()},
    **{f"name-{name}": {"fullnameOverride": name} for name in ("123", "1e3", "true", "a" * 40, "0x1f", "on", "x-1")},
    **{f"part-{name}": {"nameOverride": name} for name in ("123", "null", "e5", "fl", "y")},
    **{f"secret-{name}": {"images": {"pullSecrets": [{"name": name}]}} for name in ("123", "1e3", "true", "a.b")},
    **{f"registry-{name}": {"global": {"imageRegistry": name}} for name in ("localhost:5000", "10.0.0.1:5000/mirror", "[fd00::1]:5000")},
    **{f"tag-{tag}": {"images": {"worker": {"tag": tag}, "control": {"tag": tag}}} for tag in (20260101, "1e3", "v1", "0x10")},
    **{f"domain-{name}": {"clusterDomain": name} for name in ("cluster.local", "123", "1e3")},
    **{f"secrets-{name}": {"redis": {"existingSecret": name}} for name in ("123", "1e3", "true")},
    **{f"tls-{name}": {"redis": {"tls": {"existingSecret": name}}} for name in ("123", "no")},
    "tls-off": {"redis": {"tls": {"enabled": False}}},
    "external": {"redis": {"externalUrl": "rediss://[fd00::1]:6379", "existingSecret": "1"}},
    "sentinel": {"redis": {"externalUrl": "redis+sentinel://s/index", "existingSecret": "2"}},
    "extra": {"operator": EXTRA, "redis": {**EXTRA, "extraArgs": ["--io-threads", "2"]}},
    "account": {"operator": {"serviceAccount": {"create": False, "name": "123"}}, "rbac": {"create": False}},
    "account-name": {"operator": {"serviceAccount": {"name": "1e3", "annotations": {"role": "1"}}}},
    "policy": {"admissionPolicy": {"enabled": True, "action": "Warn", "hostPaths": ["/1e3"], "images": ["123", "true"]}},
    "monitoring": {"monitoring": {"dashboards": True, "namespaces": ["123", "1e3"], "labels": {"release": "1e3", "x": "true"}}},
    "mesh-ambient": {"networkPolicy": {"mesh": "istio-ambient"}, "monitoring": {"namespaces": []}},
    "mesh-linkerd": {"networkPolicy": {"mesh": "linkerd"}, "watch": {"namespaces": ["default"]}},
    "test-given": {"test": {"service": "123", "namespace": "default", "keySecret": {"name": "1e3", "key": "123"}}},
    "no-policies": {"networkPolicy": {"enabled": False}, "operator": {"replicas": 5}},
    "extra-objects": {"extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "own"}, "data": {"a": "1e3"}}]},
    "rollout": {"rollout": {"paused": True, "maxSurgeGPUs": 0, "maxErrorRateIncrease": "0%"}, "hub": {"endpoint": ""}},
}
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_what_the_chart_makes_of_the_values_is_accepted(server: apiserver.ApiServer, schemas: Path, part: int) -> None:
    """Several sets in one call of kubectl and of kubeconform, each of which takes a second."""
    made = []
    for name in list(SETS)[part::PARTS]:
        arguments = ("--namespace=default", f"--set=crds.install={str(not made).lower()}")  # the CRDs of one set stand for those of all
        done = helm("template", "fl", str(CHART), *arguments, "-f", "-", stdin=json.dumps(SETS[name]))
        assert done.returncode == 0, f"{name}: {done.stderr}"
        made.append(done.stdout)
    text = "\n---\n".join(made)
    applied = server.kubectl("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-", stdin=text)
    assert applied.returncode == 0, applied.stderr
    assert check(schemas, [one for one in load(text) if one["kind"] != "List"])["summary"]["invalid"] == 0
