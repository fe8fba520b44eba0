"""Building blocks of the manifest's models: the base class, CEL rules, list types, and string types with their patterns.

Names follow the Kubernetes API conventions: integers with a unit in the name for durations (`drainTimeoutSeconds`), no floats, enums in
CamelCase, acronyms in one case (`draftModelURI`), and an absent field instead of a special value.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.alias_generators import to_camel

_ACRONYM = re.compile(r"(?<=[a-z])(Ttft|Uri|Url|Cpu)(?![a-z])")


def field_name(attribute: str) -> str:
    """Return the name of a field in a manifest: `draft_model_uri` → `draftModelURI`."""
    return _ACRONYM.sub(lambda match: match.group().upper(), to_camel(attribute))


class Part(BaseModel):
    """A part of a manifest: camelCase in YAML, frozen, without unknown fields, and with types as strict as in the API server."""

    model_config = ConfigDict(alias_generator=field_name, populate_by_name=True, extra="forbid", frozen=True, strict=True)

    def check_rules(self) -> None:
        """Apply the CEL rules of this part in Python, for manifests that no API server has seen. Raises ValueError for a broken one."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self.check_rules()
        return self


def rule(expression: str, message: str, *, path: str = "") -> dict[str, str]:
    """Return one CEL rule of the CRD. The message names the field and the fix; the server adds the values.

    There is no messageExpression: Kubernetes 1.36 estimates `string(self.min)` alone at 100 times the cost that a CRD may have.
    """
    validation = {"rule": expression, "message": message}
    if path:
        validation["fieldPath"] = path
    return validation


def rules(*validations: Mapping[str, str]) -> dict[str, Any]:
    return {"x-kubernetes-validations": [dict(one) for one in validations]}


def ruled(*validations: Mapping[str, str]) -> ConfigDict:
    """Return the configuration of a part with CEL rules; its `check_rules` applies the same ones."""
    return ConfigDict(json_schema_extra=rules(*validations))


def list_set() -> dict[str, Any]:
    """Return the schema of a list without duplicates, which server-side apply merges by value."""
    return {"x-kubernetes-list-type": "set"}


def list_map(key: str) -> dict[str, Any]:
    """Return the schema of a list of objects that server-side apply merges by `key`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


WORDS = {
    "missing": "is required",
    "extra_forbidden": "unknown field",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
    "string_type": "must be a string: put it in quotes if it is one",
    "int_type": "must be a whole number, without quotes",
    "bool_type": "must be true or false, without quotes",
}
"""Messages for the error types of pydantic."""


def similar_field(part: type[BaseModel], path: Sequence[str | int]) -> str:
    """Return the field of a manifest that is most like the unknown one at `path` below `part`; empty: none is like it."""
    parts = [part]
    for name in path[:-1]:
        if isinstance(name, str):
            parts = [found for one in parts for field in _fields(one) if field[0] == name for found in _models_of(field[1])]
    names = [name for one in parts for name, _ in _fields(one)]
    return next(iter(difflib.get_close_matches(str(path[-1]), names, 1, cutoff=0.65)), "")


def _fields(part: type[BaseModel]) -> list[tuple[str, Any]]:
    return [(field.alias or name, field.annotation) for name, field in part.model_fields.items()]


def _models_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in an annotation such as `list[Adapter] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_of(inner)]


def changes_of(part: type[BaseModel], path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the path of each field below `part`, and its `examples`: values other than the default, which docs and tests use.

    Raises TypeError for a field without them.
    """
    for field in part.model_fields.values():
        models = _models_of(field.annotation)
        if not field.examples and not models:
            raise TypeError(f"give the field {path}{field.alias} examples, each another value than its default")
        if field.examples:
            yield f"{path}{field.alias}", field.examples
        else:
            yield from (found for model in models for found in changes_of(model, f"{path}{field.alias}."))


def refuse(broken: bool, message: str) -> None:
    """Apply a CEL rule in Python, for manifests that no API server has validated (`fairlead up`). Raises ValueError if it is broken."""
    if broken:
        raise ValueError(message)


GROUP_NAME_LENGTH = 44
"""Of a service with engine.nodes above 1, with the digits of its last worker's number: LeaderWorkerSet adds `-worker-N-` and ten digits for
a label. The CRD's rule counts one digit."""
GROUP_NAME_HELP = "metadata.name must be at most 43 characters with spec.engine.nodes above 1 (42 beyond 10 workers, 41 beyond 100)"
NAME_LENGTH = 52  # a label has 63 characters, and "-workers" and the suffixes that Kubernetes adds must fit
NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_HELP = (
    f"metadata.name must be at most {NAME_LENGTH} lower-case letters, digits and '-', with a letter first: it becomes the name of a Service"
)
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
MODEL_NAME = r"^[A-Za-z0-9/][A-Za-z0-9._:/-]*$"  # a "/" first too: clients of vLLM send the folder that --model names
QUANTITY = r"^[0-9]+(\.[0-9]+)?([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?$"
PERCENTAGE = r"^[0-9]{1,4}(\.[0-9]{1,2})?%$"
EXAMPLES = {
    PERCENTAGE: "a percentage such as 1%, 0.5% or 50%",
    QUANTITY: "a quantity such as 500m, 8 or 64Gi",
    DNS_SUBDOMAIN: "lower-case letters, digits, '-' and '.', a letter or digit first and last",
    DNS_LABEL: "lower-case letters, digits and '-', a letter or digit first and last",
}
"""Plain descriptions of the patterns, for error messages."""

ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]


def _whole_number(value: Any) -> Any:
    """Return a whole number as text: Kubernetes takes `cpu: 2` for a quantity, and YAML reads it as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    Field(min_length=1, max_length=32, pattern=QUANTITY),
    BeforeValidator(_whole_number),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "maxLength": 32, "minimum": 0, "pattern": QUANTITY}),
]
Percentage = Annotated[str, Field(min_length=2, max_length=8, pattern=PERCENTAGE)]
Image = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")]
Argument = Annotated[str, Field(min_length=1, max_length=4096)]

URI = (  # \w is ASCII alone in CEL, and below by re.ASCII
    r"^(hf://\w[\w.-]*/\w[\w.-]*((/[\w.-]+)+\.gguf)?(@\w[\w./-]*)?|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w.=+-]+)*/?"
    r"|gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/[\w.=+-]+)*/?|oci://\w[\w.:/-]*(@sha256:[0-9a-f]{64})?(#[\w./-]+)?"
    r"|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[\w.-]+)*/?|file:///[\w./-]+)$"
)
_URI_FORMS = (
    "hf://ORG/NAME[/FILE.gguf][@REVISION], s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, pvc://CLAIM/PATH, oci://IMAGE[#FOLDER] or file:///PATH"
)


def uri_validator(path: str) -> AfterValidator:
    """Return a validator that refuses other strings than model URIs. Its message names the field `path`."""

    def known(uri: str) -> str:
        refuse(re.match(URI, uri, re.ASCII) is None, f"{path} must be {_URI_FORMS} (got {uri!r})")
        return uri

    return AfterValidator(known)


def uri_schema(path: str) -> Any:
    """Return the same rule for the CRD, as a pydantic field. The forms are in the message of the first one."""
    forms = _URI_FORMS if path == "spec.model.uri" else "hf://ORG/NAME, or another form of spec.model.uri"
    return Field(max_length=1024, json_schema_extra=rules(rule(f"self.matches(r'{URI}')", f"{path} must be {forms}")))


_UNITS = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_UNITS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60}


def percentage(text: str) -> float:
    """Return a percentage as a fraction: `0.5%` → 0.005."""
    return float(text.removesuffix("%")) / 100


def quantity(text: str) -> float:
    """Return a Kubernetes quantity as a plain number: `2Gi` → 2147483648.0 (bytes), `500m` → 0.5, `1E3` → 1000.0."""
    if re.fullmatch(QUANTITY, text) is None:
        raise ValueError(f"{text!r} is not a quantity such as 500m, 8, 64Gi")
    number = text.rstrip("numkKMGTPEi")
    return float(number) * _UNITS[text[len(number) :]]
