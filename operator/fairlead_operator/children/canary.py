"""The canary's objects: a second Deployment with the new revision's template, and the ConfigMap that tells routers its weight.

Its pods are ordinary workers: the same Service selects them, and the same disruption budget counts them. A label distinguishes them, and an
environment variable with the revision, which they report to routers.
"""

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import PurePosixPath
from typing import Any

import msgspec

from fairlead_common.canary_split import Split
from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.children import pods
from fairlead_operator.kube.kinds import CONFIG_MAPS, make_child
from fairlead_operator.objects import Object
from fairlead_operator.revisions import find_revision
from fairlead_operator.rollout.step import Sides

SPLIT_FILE = PurePosixPath("/etc/fairlead/split/split.json")


def objects(service: InferenceService, revision: str, template: Object, sides: Sides, min_ready_seconds: int) -> list[Object]:
    """Return the objects of the canary. `template`: the pod template of `revision`, the revision on trial.

    The ConfigMap for the routers comes first: a canary without a weight gets no requests.
    """
    made = [_config_map(service, sides.split)] if service.spec.rollout.canary is not None else []
    if sides.replicas is not None:
        made.append(_deployment(service, revision, template, sides.replicas, min_ready_seconds))
    return made


def stable_template(service: InferenceService, sides: Sides, seen: Iterable[Mapping[str, Any]]) -> Object | None:
    """Return the template that the main Deployment keeps during the trial; None: it uses the wanted one."""
    if not sides.stable:
        return None
    kept = find_revision(service, names.WORKER, sides.stable, seen)
    return deepcopy(kept["data"]["template"]) if kept is not None else deepcopy(dict(sides.live or {}))


def mounted_split(service: InferenceService) -> list[pods.Mounted]:
    """Return the routers' volume of the split; none without `spec.rollout.canary`."""
    if service.spec.rollout.canary is None:
        return []
    return [pods.Mounted("split", SPLIT_FILE.parent, pods.optional_config(names.split(service)))]


def _config_map(service: InferenceService, split: Split) -> Object:
    content = msgspec.to_builtins(split) if split.revision else {}
    return make_child(service, CONFIG_MAPS, names.split(service), names.ROUTER, data={SPLIT_FILE.name: json.dumps(content)})


def _deployment(service: InferenceService, revision: str, template: Object, replicas: int, min_ready_seconds: int) -> Object:
    """Return the canary's Deployment. Its strategy is Recreate: a new canary replaces the old one and may need its GPU."""
    marked = _add_mark(template, revision)
    made = pods.deployment(service, names.WORKER, replicas=replicas, template=marked, rolling=None, min_ready_seconds=min_ready_seconds)
    selector = {"matchLabels": {**names.selector(service, names.WORKER), names.TRACK: names.CANARY_TRACK}}
    spec = {**made["spec"], "selector": selector}
    return {**made, "metadata": names.metadata(service, names.deployment(service, names.CANARY), names.CANARY), "spec": spec}


def _add_mark(template: Object, revision: str) -> Object:
    """Return the template with the canary's label, for users and the Deployment, and its environment variable, for routers."""
    made = deepcopy(template)
    metadata = made.setdefault("metadata", {})
    metadata["labels"] = {**metadata.get("labels", {}), names.TRACK: names.CANARY_TRACK}
    for container in made["spec"]["containers"]:
        if container["name"] in names.SERVING:
            others = [one for one in container.get("env", []) if one["name"] != "FAIRLEAD_CANARY"]
            container["env"] = [*others, {"name": "FAIRLEAD_CANARY", "value": revision}]
    return made
