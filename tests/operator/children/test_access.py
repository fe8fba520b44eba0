"""`spec.access` and the router's limits: their flags in the Deployments, and how the operator probes a service without a key."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.children.test_desired import objects, restricted
from tests.operator.support.manifests import SETTINGS, service
from tests.operator.support.stub_server import StubServer

from fairlead_operator.api import InferenceService, InvalidManifest
from fairlead_operator.children import router
from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed
from fairlead_operator.polling.prober import Prober, ProbeTarget
from fairlead_operator.revisions import router_revision
from fairlead_operator.settings import Settings
from fairlead_router.config import read_config

KEYS = {"access": {"keysSecretRef": {"name": "team-keys"}}}


def pod(one: InferenceService) -> Any:
    return objects(one)["Deployment", f"{one.name}-router"]["spec"]["template"]


def test_the_secret_is_mounted_as_a_folder_that_the_kubelet_renews() -> None:
    template = pod(service(**KEYS))
    restricted(template["spec"])
    (container,) = template["spec"]["containers"]
    volume = next(one for one in template["spec"]["volumes"] if one["name"] == "api-keys")
    mount = next(one for one in container["volumeMounts"] if one["name"] == "api-keys")
    assert volume["secret"]["secretName"] == "team-keys" and volume["secret"]["items"] == [{"key": "keys.yaml", "path": "keys.yaml"}]
    assert mount["readOnly"] and "subPath" not in mount
    assert read_config(container["args"]).api_keys_file == f"{mount['mountPath']}/keys.yaml"
    assert "api-keys" not in str(pod(service()))


def test_the_limits_are_the_routers_flags() -> None:
    routing = {"holdTimeoutSeconds": 300, "args": ["--max-connections=50", "--hold-timeout=7"]}
    config = read_config(pod(service(routing=routing))["spec"]["containers"][0]["args"])
    assert (config.max_connections, config.hold_timeout) == (50, 7), "the user's own arguments come last"
    worker = objects(service(engine={"maxWaitingRequests": 9}))["Deployment", "qwen-worker"]["spec"]["template"]["spec"]
    assert "--max-waiting-requests=9" in worker["containers"][0]["args"]


def test_only_what_changes_the_router_restarts_it() -> None:
    plain = router_revision(service())
    assert plain == router_revision(service(routing={"holdTimeoutSeconds": 30, "replicas": 7}))
    assert len({plain, router_revision(service(**KEYS)), router_revision(service(routing={"holdTimeoutSeconds": 31}))}) == 3


def test_without_an_index_each_router_gets_the_number_of_routers() -> None:
    alone, seen = Settings(worker_image="w", router_image="r", redis_url=""), Observed()
    for replicas in (2, 3, 2):
        made = desired(service(routing={"replicas": replicas}, **KEYS), seen, alone, datetime(2026, 1, 1, tzinfo=UTC)).objects
        seen = Observed(revisions=tuple(each for each in made if each["kind"] == "ControllerRevision"))
        (deployment,) = (each for each in made if each["kind"] == "Deployment" and each["metadata"]["name"] == "qwen-router")
        assert f"--router-replicas={replicas}" in deployment["spec"]["template"]["spec"]["containers"][0]["args"], "also of a kept template"
    assert "--router-replicas" not in " ".join(router.arguments(service(**KEYS), SETTINGS))


def test_a_secret_is_named_or_access_left_out() -> None:
    with pytest.raises(InvalidManifest, match="keysSecretRef"):
        service(access={})


async def test_the_probe_needs_no_key() -> None:
    asked = []

    def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
        asked.append(path)
        return 200, {"choices": [{"text": "x"}]}

    with StubServer(answer) as server:
        prober = Prober("cluster.local", base_url=server.url)
        assert await prober.complete(ProbeTarget.of(service(**KEYS))) == ""
        await prober.close()
    assert asked == ["/health", "/fairlead/probe"]


async def test_with_keys_the_probe_checks_the_service_and_completes_at_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """The completion without a key is on the admin port, which is in no Service."""
    asked: list[str] = []

    async def ask(self: Prober, method: str, url: str, body: Any, seconds: float) -> tuple[int, str]:
        asked.append(url)
        return 200, '{"choices": [{"text": "x"}]}'

    monkeypatch.setattr(Prober, "_request", ask)
    assert await Prober("cluster.local").complete(ProbeTarget.of(service(**KEYS), "10.0.0.9:8082")) == ""
    assert asked == ["http://qwen.default.svc.cluster.local/health", "http://10.0.0.9:8082/fairlead/probe"]


def test_the_example_is_a_manifest_and_its_routers_start_with_it() -> None:
    body = yaml.safe_load((Path(__file__).parents[3] / "examples" / "access.yaml").read_text())
    config = read_config(router.arguments(InferenceService.parse(body), SETTINGS))
    assert config.api_keys_file and config.index_mode == "mirror" and config.metrics_names == "vllm" and config.hold_timeout == 120


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("classifies", [False, True])
async def test_a_model_without_a_head_is_probed_by_an_embedding_or_a_class(keyed: bool, classifies: bool) -> None:
    """With keys, the router's own probe embeds; without keys, the operator probes."""
    asked = []

    def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
        asked.append(path)
        if path == "/v1/completions":
            return 400, {"error": {"code": "generation_not_served"}}
        if path == "/v1/embeddings" and classifies:
            return 400, {"error": {"code": "embeddings_not_served"}}
        return 200, {"object": "list", "data": [{"index": 0}]}

    with StubServer(answer) as server:
        prober = Prober("cluster.local", base_url=server.url)
        assert await prober.complete(ProbeTarget.of(service(**(KEYS if keyed else {})))) == ""
        await prober.close()
    assert asked == (["/health", "/fairlead/probe"] if keyed else ["/v1/completions", "/v1/embeddings", *["/classify"] * classifies])
