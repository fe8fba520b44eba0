"""`spec.exposure.otherServices`: the file that routers get, and what is reported."""

import json
from typing import Any

import pytest
from tests.operator.profiles.test_merge import profile
from tests.operator.reconcile.test_reconciler import OWNER, EmptyCluster, dependencies
from tests.operator.status.test_status import NOW
from tests.operator.support.manifests import SETTINGS, manifest, service

from fairlead_operator.desired import desired
from fairlead_operator.kube.cache import Cache
from fairlead_operator.observed import Observed, OtherService
from fairlead_operator.reconcile.reconciler import Reconciler
from fairlead_operator.revisions import router_revision
from fairlead_router.config import read_config
from fairlead_router.serving.model_routes import ModelRoutes

BOTH = {"exposure": {"otherServices": ["llama", "mistral"]}}
LLAMA, MISTRAL = OtherService(("llama", "sql")), OtherService(("mistral-large",))


def plan(others: dict[str, OtherService], **spec: Any) -> Any:
    return desired(service(**(BOTH | spec)), Observed(other_services=others), SETTINGS, NOW)


def child(made: Any, kind: str, name: str) -> Any:
    (found,) = [one for one in made.objects if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def test_routers_read_the_file_that_the_operator_writes(tmp_path: Any) -> None:
    made = plan({"llama": LLAMA, "mistral": MISTRAL})
    spec = child(made, "Deployment", "qwen-router")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    config = read_config(container["args"])
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "model-routes"]
    (volume,) = [one for one in spec["volumes"] if one["name"] == "model-routes"]
    assert config.model_routes_file == f"{mount['mountPath']}/routes.json"
    data = child(made, "ConfigMap", volume["configMap"]["name"])["data"]
    (tmp_path / "routes.json").write_text(data["routes.json"])
    routes = ModelRoutes(str(tmp_path / "routes.json"))
    assert routes.names() == ["llama", "mistral-large", "sql"]
    found = routes.find("sql")
    assert found is not None and (found.name, found.url) == ("llama", "http://llama.default.svc.cluster.local:80")
    assert made.wake_at == NOW.timestamp() + 15, "the models of other services may change"


def test_which_services_they_are_restarts_no_router() -> None:
    one = router_revision(service(**BOTH))
    assert one == router_revision(service(exposure={"otherServices": ["x"]})) != router_revision(service())
    made = desired(service(), Observed(), SETTINGS, NOW)
    assert not [each for each in made.objects if each["kind"] == "ConfigMap"]
    (container,) = child(made, "Deployment", "qwen-router")["spec"]["template"]["spec"]["containers"]
    assert not [each for each in container["args"] if "model-routes" in each], "routers of older images have no such flag"


@pytest.mark.parametrize(
    ("others", "words", "listed"),
    [
        ({"llama": LLAMA, "mistral": MISTRAL}, "", ["llama", "mistral"]),
        ({"llama": LLAMA}, "mistral, which does not exist in namespace default", ["llama"]),
        ({"llama": LLAMA, "mistral": OtherService(("m",), has_tls=True)}, "mistral, which serves TLS", ["llama"]),
        ({"llama": LLAMA, "mistral": OtherService(("qwen",))}, "whose model qwen has a name of this service", ["llama", "mistral"]),
    ],
)
def test_a_service_that_cannot_be_used_is_a_fault_and_left_out(others: dict[str, OtherService], words: str, listed: list[str]) -> None:
    made = plan(others)
    degraded = next(one for one in made.status.conditions if one.type == "Degraded")
    assert (degraded.reason == "OtherServiceUnusable") == bool(words) and words in degraded.message
    data = json.loads(child(made, "ConfigMap", "qwen-models")["data"]["routes.json"])
    assert [one["name"] for one in data["services"]] == listed


def test_models_of_another_service_are_read_from_its_spec() -> None:
    assert OtherService.parse(manifest("llama")) == OtherService(("llama",))
    named = manifest(
        "llama", model={"name": "meta/llama", "adapters": [{"name": "sql", "uri": "hf://a/b"}]}, router={"tls": {"secretName": "x"}}
    )
    assert OtherService.parse(named) == OtherService(("meta/llama", "sql"), has_tls=True)


async def test_the_profile_of_another_service_counts_and_may_be_missing() -> None:
    cache = Cache(lambda _: None)
    named = {"adapters": [{"name": "sql", "uri": "hf://a/b"}]}
    bodies = [manifest(exposure={"otherServices": ["llama"]}), manifest("llama", model=named, profileRef={"name": "h100"})]
    for body in bodies:
        body["metadata"] |= {"uid": body["metadata"]["name"], "resourceVersion": "5", "generation": 1}
        cache.put(body)
    loop = Reconciler(OWNER, dependencies(cache, EmptyCluster()))
    assert loop._find_other_services(service(**bodies[0]["spec"])) == {"llama": OtherService(("llama", "sql"))}, "without its profile"
    cache.put(profile(router={"tls": {"secretName": "x"}}))
    assert loop._find_other_services(service(**bodies[0]["spec"])) == {"llama": OtherService(("llama", "sql"), has_tls=True)}
