"""A cluster whose nodes are all tainted, with a quota on requests and limits in namespaces of the restricted Pod Security Standard.

The values are those of docs/operate/restricted-clusters.md. `System.prepare` enforces the standard in both namespaces.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from e2e.service import Service
from e2e.system import CHECKOUT, PATIENCE, System, eventually
from e2e.test_chart import assert_helm_test_passes
from e2e.test_volume import FOLDER, Copier
from e2e.volume import claim

pytestmark = pytest.mark.long

PAGE = (CHECKOUT / "docs" / "operate" / "restricted-clusters.md").read_text()
LIMITED_WORKER, LIMITED, PLACED = (yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S))
NODES = PLACED["operator"]
TAINT = "{key}={value}:{effect}".format(**NODES["tolerations"][0])
LABEL = next("=".join(pair) for pair in NODES["nodeSelector"].items())
QUOTA = {"limits.cpu": "100", "limits.memory": "1Ti", "requests.cpu": "100", "requests.memory": "1Ti"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLAIM = "strict"
CACHED = f"/volume/{CLAIM}/hub/models--tiny--model/snapshots/{COMMIT}"  # as the hub's client keeps it: the cluster does not reach the hub


@pytest.fixture(scope="module")
def strict(system: System) -> Iterator[System]:
    """Install the chart, or upgrade it, with the values of the page. The operator and Redis run in their new pods."""
    kubectl, copier = system.cluster.kubectl, Copier(system)
    copier.run(f"mkdir -p {CACHED} && cp /models/tiny/* {CACHED} && chmod -R 0777 /volume/{CLAIM}")
    try:
        for namespace in (system.namespace, system.models):
            metadata = {"name": "team", "namespace": namespace}
            system.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": QUOTA}})
        kubectl("label", "nodes", "--all", LABEL, "--overwrite")
        kubectl("taint", "nodes", "--all", TAINT, "--overwrite")
        system.install(**{section: {**placed, **LIMITED.get(section, {})} for section, placed in PLACED.items()})
        with explained(system):
            for name in ("operator", "redis"):
                timeout = f"--timeout={90 * PATIENCE:.0f}s"
                kubectl("rollout", "status", f"deployment/fairlead-{name}", "-n", system.namespace, timeout)
        yield system
    finally:
        kubectl("taint", "nodes", "--all", f"{TAINT}-", check=False)
        kubectl("label", "nodes", "--all", f"{LABEL.partition('=')[0]}-", check=False)
        for namespace in (system.namespace, system.models):
            kubectl("delete", "resourcequota", "team", "-n", namespace, "--ignore-not-found")
        system.install()
        copier.run(f"rm -rf /volume/{CLAIM}")


@contextmanager
def explained(system: System) -> Iterator[None]:
    """Add Kubernetes' newest warnings to a failure. They say why pods are not admitted or not placed."""
    try:
        yield
    except Exception as error:
        for namespace in (system.namespace, system.models):
            warnings = ["get", "events", "-n", namespace, "--field-selector=type=Warning", "--sort-by=.lastTimestamp", "--no-headers"]
            columns = "-o=custom-columns=:involvedObject.kind,:involvedObject.name,:reason,:message"
            error.add_note("\n".join(system.cluster.kubectl(*warnings, columns, check=False).stdout.splitlines()[-12:]))
        raise


def test_helm_test_passes_with_the_documented_values(strict: System) -> None:
    with explained(strict):
        assert_helm_test_passes(strict)


def test_every_pod_of_a_service_runs_and_a_request_is_answered(strict: System) -> None:
    """Worker, router, batch server and the Job of `prefetch`, with the page's settings but the worker's requests: this machine is small."""
    pod = {"spec": NODES}
    service = Service(strict, "bounded")
    manifest = service.manifest(
        model={
            "uri": f"hf://tiny/model@{COMMIT}",
            "cache": {"persistentVolumeClaim": {"claimName": CLAIM}, "prefetch": "Enabled"},
        },
        resources={"cpu": "500m", "memory": "2Gi"},
        podTemplate={"spec": {**LIMITED_WORKER["spec"]["podTemplate"]["spec"], **NODES}},
        routing={"replicas": 1},
        router={"podTemplate": pod},
        batch={"storageURI": f"pvc://{CLAIM}/batches", "podTemplate": pod},
    )
    with claim(strict, CLAIM, f"{FOLDER}/{CLAIM}", "ReadWriteMany"), explained(strict), service.running(manifest, replicas=1):
        for kind in ("BatchReady", "ModelCached"):
            eventually(lambda kind=kind: service.condition(kind).get("status") == "True", 120, kind)
        assert service.chat("Where do you run?")["finish"] == "length"
