"""Which commit of an hf:// model a revision loads. It is part of the stored template, so all workers of a revision load the same. Pure."""

import re
from typing import Any

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.observed import HubModel, Observed
from fairlead_operator.rollout.images import find_stored_model

_COMMIT = re.compile(r"^[0-9a-f]{40}$")
HUB = "hf://"


def find_hub_model(service: InferenceService) -> HubModel | None:
    """Return the model whose revision the hub can resolve; None: the model is not the hub's, or has a commit."""
    model = service.spec.model
    if not model.uri.startswith(HUB):
        return None
    path, _, given = model.uri.removeprefix(HUB).partition("@")
    repository = "/".join(path.split("/")[:2])  # without a GGUF file in it
    revision = given or model.revision or ""
    if _COMMIT.match(revision):
        return None
    return HubModel(repository, revision, model.endpoint or _endpoint_of_pods(service), model.secret_ref is not None)


def find_unresolved(service: InferenceService, observed: Observed) -> HubModel | None:
    """Return the model whose commit the next template needs; None: it has one, needs none, or a stored template is used."""
    if service.spec.rollout.revision is not None or find_stored_model(service, observed):
        return None
    return find_hub_model(service)


def find_commit(service: InferenceService, observed: Observed) -> str:
    """Return the commit for the next template; empty: each worker resolves the revision itself."""
    stored = find_stored_model(service, observed)
    if stored:
        commit = stored.rpartition("@")[2]
        return commit if _COMMIT.match(commit) else ""
    seen, wanted = observed.model_commit, find_unresolved(service, observed)
    return seen.commit if seen is not None and wanted is not None and seen.model == wanted else ""


def _endpoint_of_pods(service: InferenceService) -> str:
    """Return HF_ENDPOINT of the workers, which `podTemplate` may set for a mirror; `valueFrom` where only the kubelet knows it."""
    template = service.spec.pod_template.spec if service.spec.pod_template is not None else {}
    containers = [*(template.get("initContainers") or []), *(template.get("containers") or [])]
    of_model = [one for one in containers if one.get("name") in (names.WORKER, names.ENGINE)]
    variables = [variable for one in of_model for variable in one.get("env") or []]
    variables += [one.model_dump(by_alias=True) for one in service.spec.engine.env]
    found: dict[str, Any] = next((one for one in variables if one.get("name") == "HF_ENDPOINT"), {})
    return str(found.get("value") or ("valueFrom" if found.get("valueFrom") else ""))
