"""examples/inference-pool.yaml: its objects match each other, the operator's labels and the router's flags."""

from pathlib import Path
from typing import Any

import yaml

from fairlead_common.http.inference_paths import INFERENCE
from fairlead_operator.api import InferenceService
from fairlead_operator.children import redis
from fairlead_operator.names import ROUTER, WORKER, WORKER_ADMIN_PORT, WORKER_PORT, index_namespace, redis_secret, selector, workers_service
from fairlead_operator.settings import Settings
from fairlead_router.config import read_config

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_pool_its_picker_and_the_service_fit_together() -> None:
    objects: dict[str, Any] = {each["kind"]: each for each in yaml.safe_load_all((EXAMPLES / "inference-pool.yaml").read_text())}
    service = InferenceService.parse(yaml.safe_load((EXAMPLES / "minimal.yaml").read_text()))
    pool, route, entry, picker = (objects[kind] for kind in ("InferencePool", "HTTPRoute", "Service", "Deployment"))
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1" and set(pool["spec"]) == {"selector", "targetPorts", "endpointPickerRef"}
    assert pool["spec"]["selector"]["matchLabels"].items() <= selector(service, WORKER).items()
    assert pool["spec"]["targetPorts"] == [{"number": WORKER_PORT}]

    reference = pool["spec"]["endpointPickerRef"]
    assert reference["name"] == entry["metadata"]["name"] and reference["port"]["number"] == entry["spec"]["ports"][0]["port"]
    (target,) = route["spec"]["rules"][0]["backendRefs"]
    assert (target["kind"], target["name"]) == ("InferencePool", pool["metadata"]["name"])
    assert target["group"] == pool["apiVersion"].partition("/")[0]

    template = picker["spec"]["template"]
    assert entry["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert picker["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    config = read_config(container["args"])
    assert config.picker_port == entry["spec"]["ports"][0]["targetPort"] and config.picker_tls == "self-signed"
    assert config.namespace == index_namespace(service)
    assert config.worker_admin_port == WORKER_ADMIN_PORT
    assert {match["path"]["value"] for match in route["spec"]["rules"][0]["matches"]} <= set(INFERENCE)
    assert config.workers == f"dns://{workers_service(service)}.default.svc:{WORKER_PORT}"
    assert template["spec"]["terminationGracePeriodSeconds"] >= config.drain_timeout + config.drain_grace
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"http": config.port, "grpc": config.picker_port}


def test_the_picker_reaches_the_chart_s_redis_with_the_credentials_of_the_service_s_routers() -> None:
    """The chart's Redis accepts TLS connections only, verified by its own authority, and no connection without a password."""
    (picker,) = [each for each in yaml.safe_load_all((EXAMPLES / "inference-pool.yaml").read_text()) if each["kind"] == "Deployment"]
    service = InferenceService.parse(yaml.safe_load((EXAMPLES / "minimal.yaml").read_text()))
    spec = picker["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    flags = dict(argument.removeprefix("--").partition("=")[::2] for argument in container["args"])
    settings = Settings("w", "r", redis_url=flags["redis-url"], redis_credentials=True)
    assert flags["redis-url"].startswith("rediss://fairlead-redis.fairlead-system.svc.cluster.local:")
    assert redis.flags(settings).items() <= flags.items()
    *of_redis, responses = container["volumeMounts"]
    assert [mounted.mount for mounted in redis.mounted(service, settings, ROUTER)] == of_redis
    assert Path(flags["responses-secret-file"]).parent == Path(responses["mountPath"]), "several pickers need the same secret"
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in spec["volumes"]}
    assert secrets == {of_redis[0]["name"]: redis_secret(service, ROUTER), responses["name"]: "qwen-picker"}
