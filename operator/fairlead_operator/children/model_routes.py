"""The ConfigMap that tells routers which models of other services their endpoint serves too (`spec.exposure.otherServices`)."""

import json
from collections.abc import Mapping
from pathlib import PurePosixPath

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.children import pods
from fairlead_operator.kube.kinds import CONFIG_MAPS, make_child
from fairlead_operator.objects import Object
from fairlead_operator.observed import OtherService
from fairlead_operator.settings import Settings

FILE = PurePosixPath("/etc/fairlead/models/routes.json")


def objects(service: InferenceService, settings: Settings, others: Mapping[str, OtherService]) -> list[Object]:
    """Return the ConfigMap; nothing for a service that serves its own models only. A service that serves TLS is left out: see `status`."""
    if not service.spec.exposure.other_services:
        return []
    listed = [
        {
            "name": name,
            "url": f"http://{name}.{service.namespace}.svc.{settings.cluster_domain}:{names.SERVICE_PORT}",
            "models": list(others[name].models),
        }
        for name in service.spec.exposure.other_services
        if name in others and name != service.name and not others[name].has_tls
    ]
    data = {FILE.name: json.dumps({"services": listed})}
    return [make_child(service, CONFIG_MAPS, names.model_routes(service), names.ROUTER, data=data)]


def flags(service: InferenceService) -> dict[str, object]:
    """Return the router's flag; none for a service of its own models only: routers of older images do not have it."""
    return {"model-routes-file": FILE} if service.spec.exposure.other_services else {}


def mounted(service: InferenceService) -> list[pods.Mounted]:
    """Return the volume; none for a service of its own models only."""
    if not service.spec.exposure.other_services:
        return []
    return [pods.Mounted("model-routes", FILE.parent, pods.optional_config(names.model_routes(service)))]
