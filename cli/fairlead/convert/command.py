"""`fairlead convert -f FILE`: write InferenceServices with the present field names to standard output."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from fairlead.convert.fields import NotConvertible, add_earlier_names, convert_spec
from fairlead.errors import UserError
from fairlead.manifest_loader import describe_yaml_error, load_documents
from fairlead.options import takes
from fairlead.program import describe, new_app
from fairlead_operator.api import API_VERSION, KIND, InferenceService, InvalidManifest
from fairlead_operator.profiles import given_fields

KEPT_METADATA = ("name", "namespace", "labels", "annotations")
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"

app = new_app()


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The options of `fairlead convert`."""

    file: Annotated[
        Path, typer.Option("--file", "-f", metavar="FILE", help="Manifests, or the output of kubectl get -o yaml. -: standard input.")
    ]


@app.command(
    help=describe(
        "Write InferenceServices of commit 7e6be7f with the present field names. Other objects are written unchanged.",
        "fairlead convert -f service.yaml > new.yaml",
        "kubectl get inferenceservices.fairlead.dev -A -o yaml | fairlead convert -f -",
    )
)
@takes(ConvertOptions)
def convert(options: ConvertOptions) -> int:
    where = f"-f {options.file}"
    try:
        text = sys.stdin.read() if str(options.file) == "-" else options.file.read_text()
        documents = load_documents(text)
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: not YAML: {describe_yaml_error(error)}") from None
    converted = []
    for body in _flatten(documents):
        try:
            converted.append(convert_manifest(body) if body.get("kind") == KIND and body.get("apiVersion") == API_VERSION else body)
        except (NotConvertible, InvalidManifest) as error:
            metadata = body.get("metadata")
            name = metadata.get("name") if isinstance(metadata, dict) else None
            raise UserError(f"{where}: {f'{KIND} {name}' if name else KIND}: {error}") from None
    if not any(body.get("kind") == KIND for body in converted):
        raise UserError(f"{where}: contains no {KIND}; if it is the output of another command, see that command's error")
    yaml.safe_dump_all(converted, sys.stdout, sort_keys=False, width=120)
    return 0


def convert_manifest(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest without the fields that the API server or the operator wrote, and without defaults.

    Raises NotConvertible, and InvalidManifest if the result is not valid.
    """
    metadata = {key: value for key, value in _mapping(body, "metadata").items() if key in KEPT_METADATA}
    metadata["annotations"] = {key: value for key, value in _mapping(metadata, "annotations", "metadata.").items() if key != LAST_APPLIED}
    spec = convert_spec(_mapping(body, "spec"))
    try:
        service = InferenceService.parse({"metadata": metadata, "spec": spec})
    except InvalidManifest as error:
        raise InvalidManifest(add_earlier_names(str(error))) from None
    kept = {key: value for key, value in metadata.items() if value}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": kept, "spec": given_fields(service.spec)}


def _mapping(body: Mapping[str, Any], field: str, parents: str = "") -> Mapping[str, Any]:
    """Return the mapping in a field; empty without it. Raises NotConvertible for another value."""
    found = body.get(field) or {}
    if not isinstance(found, Mapping):
        raise NotConvertible(f"{parents}{field} must be a mapping (got {found!r})")
    return found


def _flatten(documents: list[Any]) -> Iterator[dict[str, Any]]:
    for document in documents:
        if isinstance(document, dict) and document.get("kind") in ("List", f"{KIND}List"):
            items = document.get("items")
            yield from _flatten(items if isinstance(items, list) else [])
        elif isinstance(document, dict):
            yield document
