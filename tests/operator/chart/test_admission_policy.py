"""The optional ValidatingAdmissionPolicy, as the chart renders it, on a real API server."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.operator.support import apiserver
from tests.operator.support.chart import template
from tests.operator.support.cluster import eventually, wait_for_crds
from tests.operator.support.manifests import manifest

from fairlead_operator.api.crd import custom_resource_definition

KINDS = ("ConfigMap", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
LISTS = ("--set=admissionPolicy.hostPaths={/mnt/models,/srv/}", "--set=admissionPolicy.images={ghcr.io/acme,registry:5000/tools/side}")
OWN = "registry:5000/fairlead/worker:20260101"
"""The chart's worker image, which the lists leave out."""
CONTROL = "registry:5000/fairlead/control:20260101"
"""The chart's image of the routers, which the lists leave out too."""
IMAGE = tuple(
    f"--set=images.{name}.{part}"
    for name in ("worker", "control")
    for part in (f"repository=registry:5000/fairlead/{name}", "tag=20260101")
)


@pytest.fixture(scope="module")
def guarded(server: apiserver.ApiServer) -> Iterator[str]:
    """A namespace under the policy; only this one, so that other tests' services are admitted."""
    name = "guarded"
    server.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    made = template("--set=admissionPolicy.enabled=true", f"--set=watch.namespaces[0]={name}", f"--namespace={name}", *LISTS, *IMAGE)
    text = yaml.safe_dump_all([one for one in made if one["kind"] in KINDS])
    done = server.kubectl("apply", "-f", "-", stdin=text)
    assert done.returncode == 0, done.stderr
    eventually(lambda: "mounted from" in refusal(server, name, volumes("/etc")))  # policies take a moment to act
    yield name
    server.kubectl("delete", "-f", "-", stdin=text)


def refusal(server: apiserver.ApiServer, namespace: str, spec: dict[str, Any]) -> str:
    """Return the server's message; empty: it would admit the service."""
    path = f"/apis/fairlead.dev/v1alpha1/namespaces/{namespace}/inferenceservices?dryRun=All"
    code, answer = server.request("POST", path, manifest("qwen", namespace, **json.loads(json.dumps(spec))))
    return "" if code == 201 else str(answer["message"])


def refused_profile(server: apiserver.ApiServer, namespace: str, spec: dict[str, Any]) -> str:
    """Return the server's message about a profile; empty: it would admit it."""
    body = {"apiVersion": "fairlead.dev/v1alpha1", "kind": "InferenceProfile", "metadata": {"name": "p"}, "spec": spec}
    path = f"/apis/fairlead.dev/v1alpha1/namespaces/{namespace}/inferenceprofiles?dryRun=All"
    code, answer = server.request("POST", path, body)
    return "" if code == 201 else str(answer["message"])


def volumes(path: str) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "hostPath": {"path": path}}]}}}


def image(name: str, where: str = "containers") -> dict[str, Any]:
    return {"podTemplate": {"spec": {where: [{"name": "x", "image": name}]}}}


ALLOWED = [
    {},
    {"podTemplate": {"metadata": {"labels": {"a": "b"}}}},
    volumes("/mnt/models"),
    volumes("/mnt/models/qwen"),
    volumes("/srv/anything"),
    image("ghcr.io/acme/worker:1"),
    image("registry:5000/tools/side@sha256:abc", "initContainers"),
    {"podTemplate": {"spec": {"containers": [{"name": "worker", "env": []}]}}},
    {"engine": {"image": "ghcr.io/acme/worker:2"}, "routing": {"image": "registry:5000/tools/side:1"}},
    {"engine": {"image": OWN}, "routing": {"image": CONTROL}},
]
REFUSED = [
    (volumes("/etc"), "mounted from /mnt/models, /srv/ only (got /etc)"),
    (volumes("/mnt/models-of-others"), "only (got /mnt/models-of-others)"),
    (volumes("/mnt/models/../../etc"), "only (got /mnt/models/../../etc)"),
    (
        image("docker.io/library/miner"),
        f"may come from ghcr.io/acme, registry:5000/tools/side, {OWN}, {CONTROL} only (got docker.io/library/miner)",
    ),
    (image("ghcr.io/acme-evil/worker", "initContainers"), "only (got ghcr.io/acme-evil/worker)"),
    (image("registry:5000/fairlead/worker:2"), "only (got registry:5000/fairlead/worker:2)"),
    (image("registry:5000/tools/sidecar"), "only (got registry:5000/tools/sidecar)"),
    ({"podTemplate": {"spec": {"volumes": [{"name": "v", "image": {"reference": "docker.io/x"}}]}}}, "only (got docker.io/x)"),
    ({"router": volumes("/etc")}, "mounted from /mnt/models, /srv/ only (got /etc)"),
    ({"router": image("docker.io/library/miner")}, "only (got docker.io/library/miner)"),
    ({"router": image("docker.io/library/miner", "initContainers")}, "only (got docker.io/library/miner)"),
    ({"batch": {"storageURI": "pvc://c", **volumes("/etc")}}, "mounted from /mnt/models, /srv/ only (got /etc)"),
    ({"batch": {"storageURI": "pvc://c", **image("docker.io/library/miner")}}, "only (got docker.io/library/miner)"),
    ({"engine": {"image": "docker.io/evil/miner"}}, "only (got docker.io/evil/miner)"),
    ({"routing": {"image": "docker.io/evil/miner"}}, "only (got docker.io/evil/miner)"),
    ({"engine": {"image": OWN}, "routing": {"image": "docker.io/evil/miner"}}, f"only (got {OWN}, docker.io/evil/miner)"),
    (volumes("/mnt/models/a") | {"router": volumes("/etc")}, "only (got /mnt/models/a, /etc)"),
]


@pytest.mark.parametrize("spec", ALLOWED, ids=json.dumps)
def test_what_is_on_the_lists_is_accepted(server: apiserver.ApiServer, guarded: str, spec: dict[str, Any]) -> None:
    assert refusal(server, guarded, spec) == ""


@pytest.mark.parametrize(("spec", "words"), REFUSED, ids=[json.dumps(spec) for spec, _ in REFUSED])
def test_what_is_not_on_the_lists_is_refused_with_the_list(
    server: apiserver.ApiServer, guarded: str, spec: dict[str, Any], words: str
) -> None:
    assert words in refusal(server, guarded, spec)


def test_the_charts_own_test_service_is_always_accepted(server: apiserver.ApiServer, guarded: str) -> None:
    made = template("--set=admissionPolicy.enabled=true", f"--set=watch.namespaces[0]={guarded}", f"--namespace={guarded}", *LISTS, *IMAGE)
    (asked,) = [one for one in made if one["kind"] == "InferenceService"]
    assert asked["spec"]["podTemplate"]["spec"]["initContainers"][0]["image"] == OWN
    assert refusal(server, guarded, asked["spec"]) == ""
    every = template("--set=admissionPolicy.enabled=true", "--namespace=default")
    (lists,) = [one for one in every if one["kind"] == "ConfigMap" and one["metadata"]["name"].endswith("-workloads")]
    assert lists["data"]["images"] == "", "an empty list still lets in any"


def test_fields_of_any_release_are_read_as_their_names_say() -> None:
    """With a CRD that accepts any field, so that the policy also covers fields which a later CRD adds."""
    if apiserver.missing():
        pytest.skip(apiserver.missing())
    crd = custom_resource_definition()
    for version in crd["spec"]["versions"]:
        version["schema"]["openAPIV3Schema"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    with apiserver.start() as alone:
        alone.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        wait_for_crds(alone)
        made = template("--set=admissionPolicy.enabled=true", "--namespace=default", *LISTS)
        done = alone.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all([one for one in made if one["kind"] in KINDS]))
        assert done.returncode == 0, done.stderr
        eventually(lambda: refusal(alone, "default", volumes("/etc")))
        for spec, words in (
            ({"model": {"cache": {"hostPath": {"path": "/var/lib"}}}}, "only (got /var/lib)"),
            ({"model": {"cache": {"hostPath": {"path": "/mnt/models/hub"}}}}, ""),
            ({"model": {"cache": {"hostPath": {"path": "/var/lib"}}}}, "only (got /var/lib)"),
            ({"model": {"cache": {"persistentVolumeClaim": {"claimName": "c"}}}}, ""),
            ({"model": {"uri": "oci://docker.io/any/model#weights"}}, "only (got docker.io/any/model)"),
            ({"model": {"uri": "oci://ghcr.io/acme#weights"}}, ""),
            ({"model": {"adapters": [{"uri": "hf://a/b"}, {"uri": "oci://docker.io/lora"}]}}, "only (got docker.io/lora)"),
            ({"engine": {"speculativeDecoding": {"draftModelURI": "oci://docker.io/draft"}}}, "only (got docker.io/draft)"),
            ({"engine": {"args": ['--speculative-config={"model": "oci://docker.io/draft"}']}}, "may not name an oci:// model"),
            ({"engine": {"args": ["--max-model-len=4096"]}}, ""),
        ):
            said = refusal(alone, "default", spec)
            assert words in said and bool(words) == bool(said), (spec, said)


def test_the_lists_may_be_edited_in_the_cluster_and_without_them_all_is_refused(
    server: apiserver.ApiServer, guarded: str, namespace: str
) -> None:
    lists = f"/api/v1/namespaces/{guarded}/configmaps/fl-fairlead-workloads"
    before = server.get(lists)
    assert refusal(server, namespace, volumes("/etc")) == "", "another namespace is not this policy's"
    try:
        code, _ = server.request("PATCH", lists, {"data": {"hostPaths": "/etc", "images": ""}}, "application/merge-patch+json")
        assert code == 200
        eventually(lambda: refusal(server, guarded, volumes("/etc")) == "")
        eventually(lambda: refusal(server, guarded, image("docker.io/any")) == "")
        server.request("DELETE", lists)
        eventually(lambda: refusal(server, guarded, {}))
    finally:
        kept = {key: before["metadata"][key] for key in ("name", "namespace", "labels")}
        server.create(f"/api/v1/namespaces/{guarded}/configmaps", {**before, "metadata": kept})
        eventually(lambda: refusal(server, guarded, {}) == "")


def test_a_profile_does_not_go_around_the_policy(server: apiserver.ApiServer, guarded: str) -> None:
    assert refused_profile(server, guarded, {}) == "" and refused_profile(server, guarded, volumes("/mnt/models/qwen")) == ""
    assert "may be mounted from" in refused_profile(server, guarded, volumes("/etc"))
    assert "may be mounted from" in refused_profile(server, guarded, {"model": {"cache": {"hostPath": {"path": "/etc"}}}})
    assert "images may come from" in refused_profile(server, guarded, image("docker.io/other"))
    for part in ("engine", "routing"):
        assert refused_profile(server, guarded, {part: {"image": "ghcr.io/acme/x:1"}}) == ""
        assert "images may come from" in refused_profile(server, guarded, {part: {"image": "docker.io/evil/miner"}})
