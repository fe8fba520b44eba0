"""Pod templates become command lines as a kubelet would build them, with local flags last."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fairlead.errors import UserError
from fairlead.local.containers import PodIdentity, environment, expand, local_container, localize, paths_of
from fairlead.local.workloads import LocalSettings, workloads

IDENTITY = PodIdentity(name="qwen-worker-0", namespace="team-a", labels={"fairlead.dev/revision": "abc"})


def test_variables_expand_as_in_kubernetes() -> None:
    env = {"POD_IP": "10.0.0.7", "PORT": "8000"}
    assert expand("$(POD_IP):$(PORT)", env) == "10.0.0.7:8000"
    assert expand("$(UNKNOWN) $$(POD_IP) $POD_IP", env) == "$(UNKNOWN) $(POD_IP) $POD_IP"


def test_downward_api_secrets_and_references_to_earlier_variables() -> None:
    entries = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "REVISION", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['fairlead.dev/revision']"}}},
        {"name": "WHO", "value": "$(POD_NAME)@$(REVISION)"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
        {"name": "EXTRA", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k", "optional": True}}},
    ]
    env = environment(entries, IDENTITY, {"HF_TOKEN": "secret"})
    assert env == {"POD_NAME": "qwen-worker-0", "REVISION": "abc", "WHO": "qwen-worker-0@abc", "HF_TOKEN": "secret"}
    with pytest.raises(UserError, match="set the variable HF_TOKEN"):
        environment(entries, IDENTITY, {})
    with pytest.raises(UserError, match=r"fieldRef spec\.hostname"):
        environment([{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.hostname"}}}], IDENTITY, {})


def test_claims_and_files_are_mapped_below_the_model_root(tmp_path: Path) -> None:
    (tmp_path / "models" / "demo").mkdir(parents=True)
    (tmp_path / "weights" / "qwen" / "x").mkdir(parents=True)
    template = {
        "spec": {
            "containers": [{"volumeMounts": [{"name": "model", "mountPath": "/mnt/model", "subPath": "qwen"}]}],
            "volumes": [{"name": "model", "persistentVolumeClaim": {"claimName": "weights"}}],
        }
    }
    find = paths_of(template, tmp_path)
    assert find("/mnt/model/x") == str(tmp_path / "weights/qwen/x")
    assert find("/models/demo") == str(tmp_path / "models/demo")
    assert find(str(tmp_path)) == str(tmp_path)
    with pytest.raises(UserError, match=f"/models/other, which does not exist on this machine .nor under --model-root {tmp_path}"):
        find("/models/other")
    with pytest.raises(UserError, match=f"{tmp_path}/weights/qwen/y, which does not exist"):
        find("/mnt/model/y")
    assert localize("--model=file:///models/demo", find) == f"--model=file://{tmp_path}/models/demo"
    assert localize('--speculative-config={"model": "file:///mnt/model/x", "a": 1}', find) == (
        f'--speculative-config={{"model": "file://{tmp_path}/weights/qwen/x", "a": 1}}'
    )
    assert localize("file:///mnt/model", find) == f"file://{tmp_path}/weights/qwen"
    assert localize("hf://org/name", find) == "hf://org/name"
    with pytest.raises(UserError, match="--model-root"):
        paths_of(template, None)("/mnt/model/x")
    template["spec"]["volumes"] = [{"name": "model", "image": {"reference": "ghcr.io/org/qwen:1"}}]
    with pytest.raises(UserError, match=r"oci://ghcr\.io/org/qwen:1, but local mode pulls no images"):
        paths_of(template, tmp_path)("/mnt/model")


def test_local_flags_come_last_and_the_parents_environment_does_not_leak(tmp_path: Path) -> None:
    settings = LocalSettings(redis_url="unix:///r", endpoints=tmp_path, logs=tmp_path, threads=1)
    found = {one.component: one for one in workloads([deployment("worker", 3), deployment("router", 2)], service="qwen", router_port=8080)}
    assert (found["worker"].replicas, found["router"].replicas) == (3, 1)
    assert (found["worker"].port, found["router"].port) == (0, 8080)
    container = local_container(
        found["worker"].template,
        IDENTITY,
        port=4000,
        flags=found["worker"].flags(4000, settings),
        variables=found["worker"].variables("qwen-worker-0", 4000, settings),
        host_env={"PATH": "/bin", "FAIRLEAD_PORT": "1", "FAIRLEAD_MODEL": "no", "FAIRLEAD_CPU_ISA": "none"},
        find_program=lambda command: ["/bin/worker"],
        find_path=lambda path: path,
    )
    assert container.command[:3] == ("/bin/worker", "--port", "8000")
    assert container.command[-2:] == ("--threads", "1")
    assert container.env["FAIRLEAD_ADVERTISE"] == "127.0.0.1:4000" and container.env["FAIRLEAD_REDIS_URL"] == "unix:///r"
    assert "FAIRLEAD_PORT" not in container.env and container.env["FAIRLEAD_CPU_ISA"] == "none"
    assert f"file://{tmp_path}/qwen" in found["router"].flags(8080, settings)
    assert "--console" in found["router"].flags(8080, settings) and "--console" not in found["worker"].flags(4000, settings)
    assert "--console" not in found["router"].flags(8080, replace(settings, router_host="0.0.0.0")), "only on loopback"


def deployment(component: str, replicas: int) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": component}
    return {
        "kind": "Deployment",
        "metadata": {"name": f"qwen-{component}", "namespace": "team-a"},
        "spec": {
            "replicas": replicas,
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": component, "args": ["--port", "8000"]}]}},
        },
    }
