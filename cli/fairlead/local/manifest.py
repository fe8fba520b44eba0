"""A manifest file, read with the operator's own models, validation and `desired()`."""

import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fairlead.errors import UserError
from fairlead.manifest_loader import describe_yaml_error, load_documents
from fairlead_operator.api import API_VERSION, KIND, InferenceService, InvalidManifest
from fairlead_operator.api.exposure import Exposure
from fairlead_operator.api.profile import PROFILE_KIND
from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed
from fairlead_operator.profiles import ProfileNotFound, parse_service, profile_name
from fairlead_operator.settings import Settings


@dataclass(frozen=True)
class Manifest:
    """The services of one file, or of one `fairlead serve`: at least one."""

    command: str
    """What the user ran, to be quoted in messages."""
    services: tuple[InferenceService, ...]
    skipped: tuple[str, ...] = ()
    """Kinds of the other objects in the file. They need a cluster."""
    path: Path | None = None


def read_manifest(path: Path) -> Manifest:
    """Read every InferenceService of a YAML file. Raises UserError, which names the file, the document and the field."""
    try:
        text = path.read_text()
        documents = load_documents(text)
    except OSError as error:
        raise UserError(f"-f {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"-f {path}: not YAML: {describe_yaml_error(error)}") from None
    nodes = yaml.compose_all(text, yaml.SafeLoader)
    services = tuple(_services(path, [_Document(*each) for each in zip(itertools.count(1), documents, nodes)]))
    skipped = tuple(dict.fromkeys(str(one["kind"]) for one in documents if _is_foreign(one)))
    if not services:
        others = f", only {', '.join(skipped)}, which need a cluster" if skipped else ""
        raise UserError(f"-f {path}: contains no {KIND}{others}")
    names = [service.name for service in services]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UserError(f"-f {path}: {', '.join(repeated)} is defined more than once; in local mode each service needs its own name")
    return Manifest(f"fairlead up -f {shlex.quote(str(path.absolute()))}", services, skipped, path)


def _is_foreign(document: Any) -> bool:
    """Return whether the object is of another API group, such as a claim or a Secret beside the service."""
    if not isinstance(document, dict):
        return False
    kind, version = document.get("kind"), document.get("apiVersion")
    ours = API_VERSION.partition("/")[0]
    return isinstance(kind, str) and isinstance(version, str) and kind != KIND and version.partition("/")[0] != ours


class _Document(NamedTuple):
    number: int
    body: Any
    node: yaml.Node | None


def _profiles(path: Path, documents: Sequence[_Document]) -> dict[str, _Document]:
    """Return the profiles of the file by name. Local mode has no namespaces. Raises UserError for one that is no profile."""
    found = {}
    for each in documents:
        body = each.body
        if not isinstance(body, dict) or body.get("kind") != PROFILE_KIND or body.get("apiVersion") != API_VERSION:
            continue
        where = f"-f {path}, document {each.number}"
        for part in ("metadata", "spec"):
            if not isinstance(body.get(part) or {}, dict):
                raise UserError(f"{where}: {_add_lines(f'{part} must be a mapping', each)}, not {type(body[part]).__name__}")
        if not (name := (body.get("metadata") or {}).get("name")):
            raise UserError(f"{where}: {_add_lines('metadata.name is missing', each)}: give the profile a name")
        found[str(name)] = each
    return found


def _services(path: Path, documents: Sequence[_Document]) -> Iterator[InferenceService]:
    profiles = _profiles(path, documents)
    for each in documents:
        document = each.body
        if document is None or _is_foreign(document):
            continue
        where = f"-f {path}, document {each.number}"
        if not isinstance(document, dict):
            raise UserError(f"{where}: expected a mapping, not {type(document).__name__}")
        kind, version = document.get("kind"), document.get("apiVersion")
        if kind == PROFILE_KIND and version == API_VERSION:
            continue
        if kind != KIND:
            raise UserError(f"{where}: kind {kind!r}; local mode runs {KIND} only")
        if version != API_VERSION:
            raise UserError(f"{where}: apiVersion {version!r}; this release supports {API_VERSION}")
        name = profile_name(document)
        profile = profiles.get(name)
        try:
            yield parse_service(document, profile.body if profile else None)
        except ProfileNotFound:
            known = ", ".join(sorted(profiles)) or "none"
            missing = f"spec.profileRef names {PROFILE_KIND} {name}, which the file does not contain (it has: {known})"
            raise UserError(f"{where}: {_add_lines(missing, each)}: add it as a document") from None
        except InvalidManifest as error:
            message = str(error)
            if not profile or not message.startswith(PROFILE_KIND):
                raise UserError(f"{where}: {_add_lines(message, each)}") from None
            about, _, message = message.partition(": ")
            about = about.replace("this service", f"{KIND} {document['metadata']['name']}")
            raise UserError(f"-f {path}: {about}: {_add_lines(message, each, profile)}") from None


_NAME = r"[\w-]+"
_FIELD = re.compile(r"(?:^|(?<=; ))(?:spec|metadata)(?:\.[\w-]+|\[\d+\])*")


def _add_lines(message: str, service: _Document, profile: _Document | None = None) -> str:
    """Add the line number to each field that the message begins a sentence with, and with a profile the document too.

    A field that is missing has the line of its parent.
    """

    def with_line(found: re.Match[str]) -> str:
        path = re.findall(_NAME, found[0])
        line, depth = _find(service.node, path)
        if profile is None:
            return f"line {line}, {found[0]}"
        theirs, deeper = _find(profile.node, path)
        number, line = (profile.number, theirs) if deeper > depth else (service.number, line)
        return f"document {number}, line {line}, {found[0]}"

    return _FIELD.sub(with_line, message)


def _find(node: yaml.Node | None, path: list[str]) -> tuple[int, int]:
    """Return the line of the field, or of its nearest parent that the document has, and how many names of the path led there."""
    line, depth = node.start_mark.line + 1 if node else 1, 0
    for name in path:
        if isinstance(node, yaml.MappingNode):
            pairs = [(key, value) for key, value in node.value if key.value == name]
            if not pairs:
                break
            line, node = pairs[0][0].start_mark.line + 1, pairs[0][1]
        elif isinstance(node, yaml.SequenceNode) and name.isdigit() and int(name) < len(node.value):
            node = node.value[int(name)]
            line = node.start_mark.line + 1
        else:
            break
        depth += 1
    return line, depth


def objects_of(service: InferenceService, *, redis_url: str) -> list[dict[str, Any]]:
    """Return what the operator would apply for `service` in an empty cluster. No GPUs are requested: workers use those of this machine.

    Gateways, canaries, TLS and autoscaling of routers are left out: they need a cluster, and a gateway would give every router one more
    fixed port.
    """
    rollout = service.spec.rollout.model_copy(update={"canary": None})
    router = service.spec.router.model_copy(update={"tls": None, "autoscaling": None})
    service = replace(service, spec=service.spec.model_copy(update={"exposure": Exposure(), "router": router, "rollout": rollout}))
    settings = Settings(worker_image="local", router_image="local", redis_url=redis_url, default_gpus=0)
    return desired(service, Observed(), settings, datetime.now(UTC)).objects
