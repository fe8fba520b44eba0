"""`fairlead migrate -f FILE`: write InferenceServices for what serves models today, and list what was not carried over."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from fairlead.errors import UserError
from fairlead.manifest_loader import describe_yaml_error, load_documents
from fairlead.migrate import kserve, kubeai, llm_d, production_stack, workloads
from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import RENDER, Fields, NotMigratable, find_template, show
from fairlead.migrate.sources import Context, OtherWorkload, Source
from fairlead.options import takes
from fairlead.program import describe, new_app
from fairlead_operator.api import API_VERSION

SOURCES = (*kserve.SOURCES, *kubeai.SOURCES, *production_stack.SOURCES, *llm_d.SOURCES, *workloads.SOURCES)
_KINDS = "KServe's LLMInferenceService and InferenceService, KubeAI's Model, values of production-stack and llm-d, and workloads with vLLM"
_OTHERS = {
    "Service": "clients call the Service that the operator makes, http://NAME.NAMESPACE/v1",
    "HorizontalPodAutoscaler": "the workload that it scales is not among those migrated",
    "ScaledObject": "the workload that it scales is not among those migrated",
    "Ingress": "point it at the Service of the InferenceService, port 80",
    "HTTPRoute": "set spec.exposure.gateway",
    "InferencePool": "set spec.exposure.gateway with backend EndpointPicker, which makes one",
    "InferenceModel": "the routers replace it",
    "InferenceObjective": "set spec.slo.classes",
    "PodDisruptionBudget": "set spec.podDisruptionBudget",
    "PodMonitor": "the chart makes PodMonitors (monitoring.podMonitors)",
    "ServiceMonitor": "the chart makes PodMonitors (monitoring.podMonitors)",
    "LLMInferenceServiceConfig": "add its fields to the services that name it in baseRefs",
    **dict.fromkeys(("ServingRuntime", "ClusterServingRuntime"), "no InferenceService of the input names it"),
    **dict.fromkeys(("Secret", "ConfigMap", "PersistentVolumeClaim", "PersistentVolume", "Namespace"), "keep it as it is"),
    **dict.fromkeys(("StorageClass", "PriorityClass"), "keep it as it is"),
    **dict.fromkeys(("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"), "keep it if you need it"),
}
"""Objects that are not migrated themselves, and what to do with them."""

app = new_app()


@dataclass(frozen=True, kw_only=True)
class MigrateOptions:
    """The options of `fairlead migrate`."""

    file: Annotated[
        list[Path],
        typer.Option("--file", "-f", metavar="FILE", help="Manifests, kubectl get -o yaml, or Helm values; repeatable. -: standard input."),
    ]


@dataclass
class Result:
    """What became of the input. `documents`: YAML of the InferenceServices; `messages`: lines for standard error."""

    documents: list[str]
    messages: list[str]
    failures: int = 0


@app.command(
    help=describe(
        "Write InferenceServices for the models that KServe, KubeAI, production-stack, llm-d or plain vLLM serve. "
        "What is not carried over is listed above each object and on standard error. "
        "Exit status: 0 every source was written, 1 some could not be, 2 none was written.",
        "fairlead migrate -f deployment.yaml -f service.yaml > inferenceservice.yaml",
        "kubectl get models.kubeai.org -A -o yaml | fairlead migrate -f -",
    )
)
@takes(MigrateOptions)
def migrate(options: MigrateOptions) -> int:
    documents = [body for file in options.file for body in _read(file)]
    result = convert(documents)
    for line in result.messages:
        print(f"fairlead migrate: {line}", file=sys.stderr)
    if not result.documents:
        found = ", ".join(dict.fromkeys(_describe(body) for body in documents)) or "no objects"
        raise UserError(f"nothing was migrated: found {found}; sources are {_KINDS}")
    sys.stdout.write("---\n".join(result.documents))
    return 1 if result.failures else 0


def _read(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file. Raises UserError."""
    where = f"-f {file}"
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: {getattr(error, 'strerror', None) or 'not text'}") from None
    try:
        documents = list(_flatten(load_documents(text)))
    except (yaml.YAMLError, ValueError, TypeError) as error:
        line = next((number for number, one in enumerate(text.splitlines(), 1) if re.search(r"\{\{(?!.*[\"'])", one)), 0)
        why = f"line {line} has {{{{ … }}}}: it {RENDER}, or write the values" if line else f"not YAML: {describe_yaml_error(error)}"
        raise UserError(f"{where}: {why}") from None
    for body in documents:
        if not isinstance(body, dict):
            raise UserError(f"{where}: contains {show(body)}, which is no manifest and no Helm values")
        if "kind" in body and any(one.matches(body) for one in SOURCES) and (template := find_template(body)):
            raise UserError(f"{where}: {show(template)} {RENDER}")
        yield body


def _flatten(documents: list[Any]) -> Iterator[Any]:
    """Yield the objects of documents and of lists, as kubectl writes them."""
    for body in documents:
        if isinstance(body, dict) and str(body.get("kind")).endswith("List") and isinstance(body.get("items"), list):
            yield from _flatten(body["items"])
        elif body is not None:
            yield body


def convert(objects: list[dict[str, Any]]) -> Result:
    """Convert all objects of the input. Objects that fail are named in the messages."""
    result, context, names = Result([], []), Context(list(objects)), set()
    others: list[tuple[int, dict[str, Any], str]] = []
    for number, body in enumerate(objects):
        source = next((one for one in SOURCES if one.matches(body)), None)
        if source is None:
            others.append((number, body, _explain(body)))
            continue
        try:
            for draft in _convert(source, body, context):
                manifest = draft.manifest()
                key = (draft.metadata.get("namespace"), draft.name)
                if key in names:
                    raise NotMigratable(f"another source became InferenceService {draft.name} too: rename one of them")
                names.add(key)
                where = _describe(body)
                result.documents.append(_write(where, draft, manifest))
                result.messages += [f"{where}: {line}" for line in draft.notes]
        except OtherWorkload as error:
            result.messages.append(f"{_describe(body)}: left out: {error}")
        except NotMigratable as error:
            result.failures += 1
            result.messages.append(f"{_describe(body)}: not migrated: {error}")
    result.messages += [f"{_describe(body)}: left out: {text}" for number, body, text in others if number not in context.used]
    return result


def _convert(source: Source, body: dict[str, Any], context: Context) -> list[Draft]:
    """Return the drafts of an object, with a note for each field that none of them has read. Raises NotMigratable."""
    fields = Fields(body)
    try:
        drafts = source.convert(fields, context)
    except NotMigratable:
        raise
    except (AttributeError, TypeError, KeyError, IndexError, ValueError):
        last = next(reversed(fields.used), "")
        raise NotMigratable(f"{last or 'the object'} is not of the type that {source.kind} has there: validate the manifest") from None
    for path, value, reason in fields.left(source.reasons):
        owner = next((one for one in drafts if one.scope and path.startswith(f"{one.scope}.")), drafts[0])
        owner.note(path, reason, value)
    return drafts


def _explain(body: Mapping[str, Any]) -> str:
    if str(body.get("apiVersion")).startswith(API_VERSION.partition("/")[0]):
        return "is Fairlead's already"
    if "resourceProfiles" in body:
        return "its resource profiles were read for Models"
    return _OTHERS.get(str(body.get("kind")), "not a source that is known: apply it yourself if you need it")


def _describe(body: Mapping[str, Any]) -> str:
    kind, name = body.get("kind"), Fields(body).look("metadata.name")
    if kind is None:
        return next((one.kind for one in SOURCES if one.matches(body)), f"values with {', '.join(map(str, list(body)[:3])) or 'nothing'}")
    return f"{kind} {name}" if name else str(kind)


def _write(where: str, draft: Draft, manifest: dict[str, Any]) -> str:
    """Return a manifest as YAML, with its notes as comments."""
    notes = [f"# - {' '.join(note.split())}" for note in draft.notes]
    head = [f"# From {where}. Not carried over, or to check:", *notes] if notes else [f"# From {where}. Every field was carried over."]
    return "\n".join(head) + "\n" + yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=140)


class _Dumper(yaml.SafeDumper):
    """Writes each list in full, without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
