"""Model sources, the cache and placement, as volumes, mounts and environment; credentials by reference only."""

from datetime import UTC, datetime
from typing import Any

import pytest
from tests.operator.support.manifests import SETTINGS, service

from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed
from fairlead_operator.revisions import router_revision, worker_revision
from fairlead_operator.status.obstacles import explain_refusal


def template(component: str = "worker", /, **spec: Any) -> dict[str, Any]:
    objects = desired(service(**spec), Observed(), SETTINGS, datetime.now(UTC)).objects
    made = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment"}
    return dict(made[f"qwen-{component}"])


def volume(spec: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((each for each in spec["volumes"] if each["name"] == name), None)


def environment(spec: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") or each["valueFrom"] for each in spec["containers"][0]["env"]}


@pytest.mark.parametrize(
    ("cache", "source"),
    [
        ({"persistentVolumeClaim": {"claimName": "models"}}, {"persistentVolumeClaim": {"claimName": "models"}}),
        ({"hostPath": {"path": "/var/lib/models"}}, {"hostPath": {"path": "/var/lib/models", "type": "Directory"}}),
        ({"emptyDir": {"sizeLimit": "50Gi"}}, {"emptyDir": {"sizeLimit": "50Gi"}}),
    ],
)
def test_the_cache_volume(cache: dict[str, Any], source: dict[str, Any]) -> None:
    made = template(model={"cache": cache})
    assert volume(made, "cache") == {"name": "cache", **source}
    assert environment(made)["FAIRLEAD_MODEL_CACHE"] == environment(made)["HF_HOME"] == "/var/cache/fairlead"


def test_a_bucket_with_its_key_by_reference() -> None:
    model = {
        "uri": "s3://models/qwen3-8b",
        "endpoint": "http://minio.storage:9000",
        "region": "eu-1",
        "secretRef": {"name": "bucket"},
    }
    made = template(model=model)
    seen = environment(made)
    assert "--model=s3://models/qwen3-8b" in made["containers"][0]["args"] and volume(made, "cache") == {"name": "cache", "emptyDir": {}}
    assert seen["AWS_ACCESS_KEY_ID"] == {"secretKeyRef": {"name": "bucket", "key": "AWS_ACCESS_KEY_ID"}}
    assert seen["AWS_SESSION_TOKEN"]["secretKeyRef"]["optional"] is True
    assert (seen["AWS_ENDPOINT_URL"], seen["AWS_REGION"]) == ("http://minio.storage:9000", "eu-1") and "HF_TOKEN" not in seen


@pytest.mark.parametrize(
    ("model", "argument", "mounted"),
    [
        ({"uri": "hf://a/b"}, "hf://a/b", "/var/cache/fairlead"),
        ({"uri": "hf://a/b@main"}, "hf://a/b@main", "/var/cache/fairlead"),
        ({"uri": "hf://a/b/c.Q4_K_M.gguf", "revision": "v1"}, "hf://a/b/c.Q4_K_M.gguf@v1", "/var/cache/fairlead"),
        ({"uri": "s3://models/quants/c.gguf"}, "s3://models/quants/c.gguf", "/var/cache/fairlead"),
        ({"uri": "pvc://models"}, "file:///mnt/model", "/mnt/model"),
        ({"uri": "pvc://models/quants/c.gguf"}, "file:///mnt/model/quants/c.gguf", "/mnt/model"),
        ({"uri": "oci://ghcr.io/a/b:1#c.gguf"}, "file:///mnt/model/c.gguf", "/mnt/model"),
        ({"uri": "file:///data/c.gguf"}, "file:///data/c.gguf", None),
    ],
)
def test_a_model_or_its_gguf_file_is_named_to_the_worker(model: dict[str, Any], argument: str, mounted: str | None) -> None:
    (container,) = template(model=model)["containers"]
    assert f"--model={argument}" in container["args"]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} - {"/tmp", "/dev/shm"} == ({mounted} if mounted else set())


def test_google_cloud_storage_with_its_key_by_reference() -> None:
    model = {"uri": "gs://models_eu/qwen3-8b", "secretRef": {"name": "gcs", "key": "key.json"}, "cache": {"emptyDir": {"sizeLimit": "9Gi"}}}
    made = template(model=model)
    seen = environment(made)
    assert "--model=gs://models_eu/qwen3-8b" in made["containers"][0]["args"] and volume(made, "cache") is not None
    assert seen["GOOGLE_SERVICE_ACCOUNT_KEY"] == {"secretKeyRef": {"name": "gcs", "key": "key.json"}}
    assert not {"HF_TOKEN", "AWS_ACCESS_KEY_ID", "GOOGLE_BASE_URL"} & seen.keys()
    plain = environment(template(model={"uri": "gs://models/a", "endpoint": "https://storage-x.p.googleapis.com"}))
    assert plain["GOOGLE_BASE_URL"] == "https://storage-x.p.googleapis.com"
    assert "GOOGLE_SERVICE_ACCOUNT_KEY" not in plain, "Workload Identity gives the pod its role"


def test_a_mirror_of_the_hub() -> None:
    model = {"uri": "hf://a/b", "endpoint": "https://hub.corp", "secretRef": {"name": "hub"}}
    seen = environment(template(model=model))
    assert seen["HF_ENDPOINT"] == "https://hub.corp" and seen["HF_TOKEN"]["secretKeyRef"]["key"] == "token"
    assert worker_revision(service(model=model)) != worker_revision(service(model={**model, "endpoint": "https://other.corp"}))


def test_an_image_as_a_volume() -> None:
    made = template(model={"uri": "oci://ghcr.io/org/qwen:1.0@sha256:" + "0" * 64 + "#models/8b"})
    image = {"reference": "ghcr.io/org/qwen:1.0@sha256:" + "0" * 64, "pullPolicy": "IfNotPresent"}
    assert volume(made, "model") == {"name": "model", "image": image} and volume(made, "cache") is None
    assert "--model=file:///mnt/model/models/8b" in made["containers"][0]["args"]


def test_a_cluster_without_image_volumes_is_named() -> None:
    words = 'Deployment.apps "qwen-worker" is invalid: spec.template.spec.volumes[2]: Required value: must specify a volume type'
    said = explain_refusal(service(model={"uri": "oci://a/b:1"}), "Deployment/qwen-worker", words)
    assert said.reason == "PodTemplateInvalid" and "ImageVolume" in said.message and words in said.message
    assert explain_refusal(service(), "Deployment/qwen-worker", words).reason == "ApplyFailed"


def test_warm_up_is_given_in_variables() -> None:
    seen = environment(template())
    assert seen["FAIRLEAD_WARMUP_TOKENS"] == "8192"
    assert seen["FAIRLEAD_PEERS"].startswith("dns://qwen-workers.default.svc.") and seen["FAIRLEAD_PEERS"].endswith(":8000")
    assert "FAIRLEAD_WARMUP_TOKENS" not in environment(template(engine={"warmupTokens": 0}))
    assert not any("warm" in argument for argument in template()["containers"][0]["args"])


def test_placement_and_pull_secrets() -> None:
    made = template(resources={"gpus": 1, "gpuType": "NVIDIA-H100-80GB-HBM3"}, imagePullSecrets=[{"name": "registry"}])
    required = made["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (wanted,) = required["nodeSelectorTerms"][0]["matchExpressions"]
    assert wanted == {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H100-80GB-HBM3"]}
    assert made["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    of_router = template("router", imagePullSecrets=[{"name": "registry"}])
    assert made["imagePullSecrets"] == of_router["imagePullSecrets"] == [{"name": "registry"}]
    plain = template(resources={"gpus": 0})
    assert not {"affinity", "tolerations", "imagePullSecrets"} & plain.keys()


def test_new_fields_that_are_not_used_restart_nothing() -> None:
    for revision in (worker_revision, router_revision):
        assert revision(service(imagePullSecrets=[])) == revision(service())
        assert revision(service(imagePullSecrets=[{"name": "a"}])) != revision(service())
