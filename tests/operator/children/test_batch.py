"""`spec.batch`: the batch server beside the routers, its storage, and its condition. Pure."""

import json
from typing import Any

import pytest
from tests.operator.children.test_desired import NOW, objects, restricted
from tests.operator.support.manifests import SETTINGS, deployment, service

from fairlead_operator.api import InferenceService, InvalidManifest
from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed
from fairlead_operator.revisions import batch_revision, router_revision, worker_revision
from fairlead_router.batch.config import read_config
from fairlead_router.config import read_config as read_router_config

CLAIM: dict[str, Any] = {"storageURI": "pvc://batches/chat"}


def pod(one: InferenceService, component: str = "batch") -> Any:
    return objects(one)["Deployment", f"qwen-{component}"]["spec"]["template"]["spec"]


def test_a_service_without_batches_has_no_part_of_them() -> None:
    text = json.dumps(list(objects(service()).values()))
    assert "batch" not in text


def test_its_pod_template_is_merged_and_cannot_break_the_selector() -> None:
    template = {
        "metadata": {"labels": {"team": "a", "app.kubernetes.io/component": "x"}},
        "spec": {
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "batch", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}],
        },
    }
    one = service(batch={**CLAIM, "podTemplate": template})
    deployed = objects(one)["Deployment", "qwen-batch"]["spec"]
    assert deployed["template"]["metadata"]["labels"]["team"] == "a"
    assert deployed["selector"]["matchLabels"].items() <= deployed["template"]["metadata"]["labels"].items()
    assert pod(one)["tolerations"] == [{"operator": "Exists"}] and pod(one)["containers"][0]["resources"]["limits"]["cpu"] == "1"
    plain = service(batch=CLAIM)
    assert batch_revision(one) != batch_revision(plain)
    assert (worker_revision(one), router_revision(one)) == (worker_revision(plain), router_revision(plain))


def test_one_pod_at_a_time_with_the_claim_and_the_routers_secret() -> None:
    one = service(batch=CLAIM)
    made = objects(one)
    spec = made["Deployment", "qwen-batch"]["spec"]
    assert spec["replicas"] == 1 and spec["strategy"] == {"type": "Recreate"}
    (container,) = pod(one)["containers"]
    restricted(pod(one))
    config = read_config(container["args"])
    assert container["command"] == ["fairlead-batch"] and container["image"] == SETTINGS.router_image
    assert config.storage == "file:///var/lib/fairlead/chat" and config.max_concurrency == 64
    assert config.router_url == "http://qwen.default.svc.cluster.local:80"
    assert {"name": "storage", "persistentVolumeClaim": {"claimName": "batches"}} in pod(one)["volumes"]
    router = read_router_config(pod(one, "router")["containers"][0]["args"])
    assert router.batch_url == "http://qwen-batch.default.svc.cluster.local:8090"
    assert router.batch_secret_file == config.secret_file == "/etc/fairlead/batch/secret"
    secrets = [name for kind, name in made if kind == "Secret" and name.startswith("qwen-batch-")]
    for component in ("batch", "router"):
        volumes = {volume["name"]: volume for volume in pod(one, component)["volumes"]}
        assert [volumes["batch-secret"]["secret"]["secretName"]] == secrets
        assert {"name": "batch-secret", "mountPath": "/etc/fairlead/batch", "readOnly": True} in pod(one, component)["containers"][0][
            "volumeMounts"
        ]
    order = list(made)
    assert order.index(("Secret", secrets[0])) < order.index(("Deployment", "qwen-router")), "pods mount it"
    assert made["Service", "qwen-batch"]["spec"]["ports"][0]["port"] == 8090


def test_it_trusts_the_certificate_of_routers_with_tls_and_never_gets_their_key() -> None:
    one = service(batch=CLAIM, router={"tls": {"secretName": "llm-tls"}})
    config = read_config(pod(one)["containers"][0]["args"])
    assert config.router_url == "https://qwen.default.svc.cluster.local:443" and config.router_certfile == "/etc/fairlead/tls/tls.crt"
    (volume,) = [each["secret"] for each in pod(one)["volumes"] if each["name"] == "tls"]
    assert volume["secretName"] == "llm-tls" and [each["key"] for each in volume["items"]] == ["tls.crt"]
    mount = next(each for each in pod(one)["containers"][0]["volumeMounts"] if each["name"] == "tls")
    assert mount["mountPath"] == "/etc/fairlead/tls" and "subPath" not in mount
    assert batch_revision(one) != batch_revision(service(batch=CLAIM)) == "35d8b528e7", "without TLS as before"


def test_a_bucket_takes_its_keys_from_the_secret_and_is_no_volume() -> None:
    one = service(batch={"storageURI": "s3://batches/chat", "secretName": "keys", "maxConcurrency": 7})
    (container,) = pod(one)["containers"]
    config = read_config(container["args"])
    assert (config.storage, config.max_concurrency) == ("s3://batches/chat", 7)
    needed = {entry["name"]: entry["valueFrom"]["secretKeyRef"] for entry in container["env"] if "valueFrom" in entry}
    assert {name for name, source in needed.items() if not source.get("optional")} == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert {"AWS_ENDPOINT_URL", "AWS_REGION"} < needed.keys() and {source["name"] for source in needed.values()} == {"keys"}
    assert not [volume for volume in pod(one)["volumes"] if "persistentVolumeClaim" in volume]


def test_only_routers_and_monitoring_reach_it() -> None:
    made = objects(service(batch=CLAIM))
    (rule,) = made["NetworkPolicy", "qwen-batch"]["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 8090}]
    assert rule["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"


def test_a_change_restarts_its_pod_and_never_workers() -> None:
    plain, one, other = service(), service(batch=CLAIM), service(batch=CLAIM | {"maxConcurrency": 9})
    assert batch_revision(one) != batch_revision(other)
    assert router_revision(plain) != router_revision(one) == router_revision(other)
    assert worker_revision(plain) == worker_revision(one)


@pytest.mark.parametrize(
    "uri", ["pvc://", "s3://", "file:///x", "pvc://a/../b/ c", "s3://Bucket/x", "hf://a/b", "pvc://claim//x"], ids=lambda uri: str(uri)
)
def test_other_storage_is_refused(uri: str) -> None:
    with pytest.raises(InvalidManifest, match=r"spec.batch.storageURI"):
        service(batch={"storageURI": uri})


def condition(observed: Observed, **batch: Any) -> Any:
    status = desired(service(batch=CLAIM | batch), observed, SETTINGS, NOW).status
    return {one.type: one for one in status.conditions}


def test_the_condition_follows_its_pod() -> None:
    starting = condition(Observed(deployments={"batch": deployment("batch", 1, ready=0)}))
    assert (starting["BatchReady"].status, starting["BatchReady"].reason) == ("False", "Starting")
    ready = condition(Observed(deployments={"batch": deployment("batch", 1)}))
    assert (ready["BatchReady"].status, ready["BatchReady"].reason) == ("True", "Serving")
    assert "BatchReady" not in {one.type for one in desired(service(), Observed(), SETTINGS, NOW).status.conditions}


def test_a_pod_that_cannot_start_is_a_fault_with_its_cause() -> None:
    labels = {"app.kubernetes.io/component": "batch", "fairlead.dev/revision": batch_revision(service(batch=CLAIM))}
    waiting = {"name": "batch", "ready": False, "restartCount": 0, "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no"}}}
    broken = {"kind": "Pod", "metadata": {"name": "qwen-batch-1", "labels": labels}, "status": {"containerStatuses": [waiting]}}
    found = condition(Observed(deployments={"batch": deployment("batch", 1, ready=0)}, pods=(broken,)))
    assert found["BatchReady"].reason == found["Degraded"].reason == "ImagePullBackOff"
    assert found["Degraded"].status == "True"
