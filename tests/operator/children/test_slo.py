"""Service classes: the manifest becomes the routers' flags, and what does not fit together is refused."""

from pathlib import Path
from typing import Any

import yaml
from tests.operator.support.manifests import SETTINGS, service

from fairlead_operator.api import InferenceService
from fairlead_operator.api.slo import SloClass
from fairlead_operator.children import router
from fairlead_operator.revisions import router_revision
from fairlead_router.config import RouterConfig, read_config
from fairlead_router.service_classes import BATCH, MAX_CLASSES, ServiceClass

CHAT = {"name": "chat", "ttftMilliseconds": 500, "ttftMillisecondsPerThousandTokens": 100, "itlMilliseconds": 50}
CLASSES = [CHAT, {"name": "agents", "priority": 5, "ttftMilliseconds": 4000}, {"name": "bulk", "priority": 20}]


def config(**spec: Any) -> RouterConfig:
    return read_config(router.arguments(service(**spec), SETTINGS))


def test_the_routers_get_the_classes_of_the_manifest() -> None:
    classes = config(slo={"classes": CLASSES, "defaultClass": "chat"}).service_classes
    assert list(classes.by_name) == ["batch", "chat", "agents", "bulk"] and classes.default is classes.by_name["chat"]
    assert classes.by_name["chat"] == ServiceClass.model_validate({"priority": 0, **CHAT})
    assert [each.is_best_effort for each in classes.by_name.values()] == [True, False, False, True]


def test_without_slo_the_routers_get_no_flag_of_it() -> None:
    assert "slo" not in " ".join(router.arguments(service(), SETTINGS))
    assert config(slo={"defaultClass": "batch"}).service_classes.default == BATCH
    assert list(config().service_classes.by_name) == ["batch"]


def test_a_change_of_a_class_restarts_the_routers() -> None:
    specs = [{}, {"slo": {"classes": CLASSES}}, {"slo": {"classes": CLASSES[:1]}}, {"slo": {"classes": CLASSES, "defaultClass": "chat"}}]
    assert len({router_revision(service(**spec)) for spec in specs}) == len(specs)


def test_manifest_and_flag_have_the_same_keys() -> None:
    def bounds(model: Any) -> dict[str, Any]:
        schema = model.model_json_schema(by_alias=True)["properties"]
        return {name: [field.get(key) for key in ("minimum", "maximum", "anyOf", "default")] for name, field in schema.items()}

    assert bounds(SloClass) == bounds(ServiceClass)
    assert MAX_CLASSES == 16


def test_the_example_is_a_manifest_and_its_routers_start_with_it() -> None:
    body = yaml.safe_load((Path(__file__).parents[3] / "examples" / "slo.yaml").read_text())
    classes = read_config(router.arguments(InferenceService.parse(body), SETTINGS)).service_classes
    assert list(classes.by_name) == ["batch", "chat", "agents"] and classes.default is not None
