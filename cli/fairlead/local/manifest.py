"""A manifest file as the operator's own objects: the same models, the same checks, the same `desired()`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from fairlead.errors import UserError
from fairlead_operator.api import API_VERSION, KIND, InferenceService, InvalidManifest
from fairlead_operator.api.exposure import Exposure
from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed
from fairlead_operator.settings import Settings


@dataclass(frozen=True)
class Manifest:
    """The services of one file, at least one."""

    path: Path
    services: tuple[InferenceService, ...]
    skipped: tuple[str, ...] = ()
    """Kinds of the other objects in the file, which have no meaning without a cluster."""


def read_manifest(path: Path) -> Manifest:
    """Read every InferenceService of a YAML file. UserError names the file, the document and the field."""
    try:
        documents = list(yaml.safe_load_all(path.read_text()))
    except OSError as error:
        raise UserError(f"-f {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"-f {path}: not YAML: {error}") from None
    services = tuple(_services(path, documents))
    skipped = tuple(dict.fromkeys(str(one["kind"]) for one in documents if _is_foreign(one)))
    if not services:
        others = f", only {', '.join(skipped)}, which need a cluster" if skipped else ""
        raise UserError(f"-f {path}: holds no {KIND}{others}")
    names = [service.name for service in services]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"-f {path}: {', '.join(twice)} is there twice; local mode needs one name for one service")
    return Manifest(path, services, skipped)


def _is_foreign(document: Any) -> bool:
    """An object of Kubernetes' own or of others, such as a claim or a Secret beside the service."""
    if not isinstance(document, dict):
        return False
    kind, version = document.get("kind"), document.get("apiVersion")
    ours = API_VERSION.partition("/")[0]
    return isinstance(kind, str) and isinstance(version, str) and kind != KIND and version.partition("/")[0] != ours


def _services(path: Path, documents: list[Any]) -> Iterator[InferenceService]:
    for number, document in enumerate(documents, start=1):
        if document is None or _is_foreign(document):
            continue
        where = f"-f {path}, document {number}"
        if not isinstance(document, dict):
            raise UserError(f"{where}: a mapping was expected, not {type(document).__name__}")
        kind, version = document.get("kind"), document.get("apiVersion")
        if kind != KIND:
            raise UserError(f"{where}: kind {kind!r}; local mode runs {KIND} only")
        if version != API_VERSION:
            raise UserError(f"{where}: apiVersion {version!r}; this release knows {API_VERSION}")
        try:
            yield InferenceService.parse(document)
        except InvalidManifest as error:
            raise UserError(f"{where}: {error}") from None


def objects_of(service: InferenceService, *, redis_url: str) -> list[dict[str, Any]]:
    """What the operator would apply for `service` to an empty cluster. GPUs are whatever this machine has, so none are asked for.

    Without what a cluster does around the pods: gateways, which would give every router one fixed port more, and canaries.
    """
    rollout = service.spec.rollout.model_copy(update={"canary": None})
    service = replace(service, spec=service.spec.model_copy(update={"exposure": Exposure(), "rollout": rollout}))
    settings = Settings(worker_image="local", router_image="local", redis_url=redis_url, default_gpus=0)
    return desired(service, Observed(), settings, datetime.now(UTC)).objects
