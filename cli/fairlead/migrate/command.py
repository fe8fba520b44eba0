"""`fairlead migrate -f FILE`: write InferenceServices for what serves models today, and list what was not carried over."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from fairlead.errors import UserError
from fairlead.manifest_loader import describe_yaml_error, load_documents
from fairlead.migrate.context import Context, OtherWorkload
from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import RENDER, Fields, NotMigratable, find_template, reasons, show
from fairlead.migrate.kserve import LLM_REASONS, PREDICTOR_REASONS, convert_llm, convert_predictor
from fairlead.migrate.kubeai import MODEL_REASONS, convert_model
from fairlead.migrate.production_stack import ENGINES, MODEL, STACK_REASONS, convert_stack, split_stack
from fairlead.migrate.workloads import WORKLOAD_REASONS, convert_workload
from fairlead.options import takes
from fairlead.program import describe, new_app
from fairlead_operator.api import API_VERSION

Source = tuple[Callable[[Fields, Context], Draft], Mapping[str, str]]
"""Reads an object; and why fields of it are not carried over."""
SOURCES: Mapping[tuple[str, str], Source] = {
    ("serving.kserve.io", "LLMInferenceService"): (convert_llm, LLM_REASONS),
    ("serving.kserve.io", "InferenceService"): (convert_predictor, PREDICTOR_REASONS),
    ("kubeai.org", "Model"): (convert_model, MODEL_REASONS),
    ("apps", "Deployment"): (convert_workload, WORKLOAD_REASONS),
    ("apps", "StatefulSet"): (convert_workload, WORKLOAD_REASONS),
}
"""By API group, in each version, and kind."""
_STACK = (convert_stack, STACK_REASONS)
_KINDS = (
    "KServe's LLMInferenceService and InferenceService, KubeAI's Model, Helm values of production-stack, and Deployments and StatefulSets "
    "with vLLM"
)
_VALUES = (
    "only Helm values of production-stack, and KubeAI's beside a Model, are read: render the chart, "
    "`helm template NAME CHART -f values.yaml | fairlead migrate -f -`"
)
_OTHERS = reasons("kinds")
"""What to do with objects that are not migrated themselves, by kind."""

app = new_app()


@dataclass(frozen=True, kw_only=True)
class MigrateOptions:
    """The options of `fairlead migrate`."""

    file: Annotated[
        list[Path],
        typer.Option("--file", "-f", metavar="FILE", help="Manifests, or kubectl get -o yaml; repeatable. -: standard input."),
    ]


@dataclass
class Result:
    """What became of the input. `documents`: YAML of the InferenceServices; `messages`: lines for standard error."""

    documents: list[str]
    messages: list[str]
    failures: int = 0


@app.command(
    help=describe(
        "Write InferenceServices for the models that KServe, llm-d, KubeAI, production-stack or plain vLLM serve. "
        "What is not carried over is listed above each object and on standard error. "
        "Exit status: 0 every source was written, 1 some could not be, 2 none was written.",
        "fairlead migrate -f deployment.yaml -f service.yaml > inferenceservice.yaml",
        "kubectl get deployments -n llm -o yaml | fairlead migrate -f -",
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
        documents = list(_flatten(load_documents(text)))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: {getattr(error, 'strerror', None) or 'not text'}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        line = next((number for number, one in enumerate(text.splitlines(), 1) if re.search(r"\{\{(?!.*[\"'])", one)), 0)
        why = f"line {line} has {{{{ … }}}}: it {RENDER}, or write the values" if line else f"not YAML: {describe_yaml_error(error)}"
        raise UserError(f"{where}: {why}") from None
    for body in documents:
        if not isinstance(body, dict):
            raise UserError(f"{where}: contains {show(body)}, which is no manifest")
        if "kind" in body and _find_source(body) and (template := find_template(body)):
            raise UserError(f"{where}: {show(template)} {RENDER}")
        yield body


def _flatten(documents: list[Any]) -> Iterator[Any]:
    """Yield the objects of documents and of lists, as kubectl writes them."""
    for body in documents:
        if isinstance(body, dict) and str(body.get("kind")).endswith("List") and isinstance(body.get("items"), list):
            yield from _flatten(body["items"])
        elif body is not None:
            yield body


def _find_source(body: Mapping[str, Any]) -> Source | None:
    if "kind" not in body:
        return _STACK if ENGINES in body else None
    return SOURCES.get((str(body.get("apiVersion")).partition("/")[0], str(body.get("kind"))))


def convert(objects: list[dict[str, Any]]) -> Result:
    """Convert all objects of the input. Objects that fail are named in the messages."""
    objects = [part for body in objects for part in split_stack(body)]
    result, context, names = Result([], []), Context(list(objects)), set()
    for body in objects:
        if (source := _find_source(body)) is None:
            continue
        where = _describe(body)
        try:
            draft = _convert(body, source, context)
            manifest = draft.manifest()
            if (key := (draft.metadata.get("namespace"), draft.name)) in names:
                raise NotMigratable(f"another source became InferenceService {draft.name} too: rename one of them")
        except OtherWorkload as error:
            result.messages.append(f"{where}: left out: {error}")
        except NotMigratable as error:
            result.failures += 1
            result.messages.append(f"{where}: not migrated: {error}")
        else:
            names.add(key)
            result.documents.append(_write(where, draft, manifest))
            result.messages += [f"{where}: {line}" for line in draft.notes]
    unused = [body for number, body in enumerate(objects) if number not in context.used and not _find_source(body)]
    result.messages += [f"{_describe(body)}: left out: {_explain(body)}" for body in unused]
    return result


def _convert(body: dict[str, Any], source: Source, context: Context) -> Draft:
    """Return the draft of an object, with a note for each field that was not read. Raises NotMigratable and OtherWorkload."""
    fields, (convert_source, known) = Fields(body), source
    try:
        draft = convert_source(fields, context)
    except NotMigratable:
        raise
    except (AttributeError, TypeError, KeyError, IndexError, ValueError):
        last = next(reversed(fields.used), "")
        what = f"{last} {show(fields.look(last), last)}" if last and "[" not in last else last or "the object"
        raise NotMigratable(f"{what} is not of the type that {body.get('kind', 'the chart')} has there: validate the manifest") from None
    for read, why in ((fields, {**reasons("metadata"), **known}), *([draft.beside] if draft.beside else [])):
        for path, value, reason in read.left(why):
            draft.note(path, reason, value)
    return draft


def _explain(body: Mapping[str, Any]) -> str:
    if str(body.get("apiVersion")).startswith(API_VERSION.partition("/")[0]):
        return "is Fairlead's already"
    return _OTHERS.get(str(body.get("kind")), "not a source that is known: apply it yourself if you need it") if "kind" in body else _VALUES


def _describe(body: Mapping[str, Any]) -> str:
    kind, name = body.get("kind"), Fields(body).look("metadata.name")
    if kind is None and ENGINES in body:
        return f"production-stack {Fields(body).look(f'{MODEL}.name', 'values')}"
    if kind is None:
        return f"values with {', '.join(map(str, list(body)[:3])) or 'nothing'}"
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
