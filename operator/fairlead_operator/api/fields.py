"""The building blocks of the manifest's models: the common base, CEL rules, and the string types with their patterns."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Part(BaseModel):
    """A part of a manifest: camelCase outside, frozen, unknown fields refused, types as strict as in the API server."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, strict=True)


def rule(expression: str, message: str, *, path: str = "") -> dict[str, str]:
    """One CEL rule of the CRD. The message names the field and the fix; the server adds the values.

    No messageExpression: `string(self.min)` alone is estimated at 100 times the cost that a CRD may have (Kubernetes 1.36).
    """
    made = {"rule": expression, "message": message}
    if path:
        made["fieldPath"] = path
    return made


def rules(*made: Mapping[str, str]) -> dict[str, Any]:
    return {"x-kubernetes-validations": [dict(one) for one in made]}


WORDS = {
    "missing": "is required",
    "extra_forbidden": "unknown field",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
    "string_type": "must be a string: put it in quotes if it is one",
    "int_type": "must be a whole number, without quotes",
    "float_type": "must be a number, without quotes",
    "bool_type": "must be true or false, without quotes",
}
"""pydantic's kinds of errors in the words of a manifest."""


def refuse(broken: bool, message: str) -> None:
    """A CEL rule in Python, for manifests that no API server has seen (`fairlead up`). Raises ValueError."""
    if broken:
        raise ValueError(message)


NAME_LENGTH = 52  # leaves room in a 63-character label for "-workers" and the suffixes that Kubernetes adds
NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_HELP = f"metadata.name must be at most {NAME_LENGTH} lower-case letters, digits and '-', a letter first: Services are named after it"
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
DURATION = r"^([0-9]+(ms|s|m|h))+$"
EXAMPLES = {
    DURATION: "a duration such as 30s, 10m or 1h30m",
    QUANTITY: "a quantity such as 500m, 8 or 64Gi",
    DNS_SUBDOMAIN: "lower-case letters, digits, '-' and '.', a letter or digit first and last",
    DNS_LABEL: "lower-case letters, digits and '-', a letter or digit first and last",
}
"""What a string must be, for people who read no patterns."""

ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
Quantity = Annotated[str, Field(min_length=1, max_length=32, pattern=QUANTITY)]
Duration = Annotated[str, Field(min_length=2, max_length=16, pattern=DURATION)]
Argument = Annotated[str, Field(min_length=1, max_length=4096)]

URI = (
    r"^(hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._/-]*)?"
    r"|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._=+-]+)*/?"
    r"|oci://[A-Za-z0-9][A-Za-z0-9.:/_-]*(@sha256:[0-9a-f]{64})?(#[A-Za-z0-9._/-]+)?"
    r"|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[A-Za-z0-9._-]+)*/?"
    r"|file:///[A-Za-z0-9._/-]+)$"
)


def _uri_help(path: str) -> str:
    return f"{path} must be hf://ORG/NAME[@REVISION], s3://BUCKET/FOLDER, pvc://CLAIM/PATH, oci://IMAGE[#FOLDER] or file:///PATH"


def known_uri(path: str) -> AfterValidator:
    """Refuses what is no model URI, naming the manifest's `path`."""

    def known(uri: str) -> str:
        refuse(re.match(URI, uri) is None, f"{_uri_help(path)} (got {uri!r})")
        return uri

    return AfterValidator(known)


def uri_schema(path: str) -> Any:
    """The same for the CRD: a pydantic field."""
    return Field(max_length=1024, json_schema_extra=rules(rule(f"self.matches(r'{URI}')", _uri_help(path))))


_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_UNITS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(duration: str) -> float:
    """`1m30s` → 90.0 seconds."""
    parts = re.findall(r"([0-9]+)(ms|s|m|h)", duration)
    return sum(float(count) * _SECONDS[unit] for count, unit in parts)


def quantity(text: str) -> float:
    """A Kubernetes quantity as a plain number: `2Gi` → 2147483648.0 (bytes), `500m` → 0.5."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-zA-Z]*)", text)
    if match is None or match.group(2) not in _UNITS:
        raise ValueError(f"{text!r} is not a quantity such as 500m, 8, 64Gi")
    return float(match.group(1)) * _UNITS[match.group(2)]
