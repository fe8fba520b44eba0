"""An InferenceService as the operator and `fairlead up` hold it: parsed, typed, immutable."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fairlead_operator.api.adapters import MODELS_NAME
from fairlead_operator.api.fields import EXAMPLES, NAME, NAME_HELP, NAME_LENGTH, WORDS
from fairlead_operator.api.spec import ServiceSpec
from fairlead_operator.api.status import ServiceStatus

LONGEST = 80
"""Characters of a wrong value that are quoted."""


class InvalidManifest(ValueError):
    """The manifest cannot be read; the message names each field and what is wrong with it."""


@dataclass(frozen=True)
class InferenceService:
    """One service: who it is, what it should be, and what was last said about it."""

    name: str
    namespace: str
    spec: ServiceSpec
    uid: str = ""
    generation: int = 0
    deleting: bool = False
    status: ServiceStatus = field(default_factory=ServiceStatus)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> "InferenceService":
        """Read a manifest or an API object. Raises InvalidManifest; the API server has refused most of these before."""
        metadata = body.get("metadata") or {}
        if not isinstance(metadata, Mapping):
            raise InvalidManifest(f"metadata must be a mapping with a name (got {metadata!r})")
        name = metadata.get("name") or ""
        if not name:
            raise InvalidManifest("metadata.name is missing: give the service a name")
        if not isinstance(name, str) or len(name) > NAME_LENGTH or re.match(NAME, name) is None:
            raise InvalidManifest(f"{NAME_HELP} (got {name!r})")
        try:
            spec = ServiceSpec.model_validate(body.get("spec") or {})
        except ValidationError as error:
            raise InvalidManifest(describe(error)) from None
        if spec.model.name is None and name in {one.name for one in spec.model.adapters}:
            raise InvalidManifest(f"{MODELS_NAME} (it is {name!r}, the service's)")
        try:
            status = ServiceStatus.model_validate(body.get("status") or {})
        except ValidationError:
            status = ServiceStatus()  # of another version of the operator: it is written anew from what is observed
        return cls(
            name=name,
            namespace=metadata.get("namespace") or "default",
            spec=spec,
            uid=metadata.get("uid") or "",
            generation=int(metadata.get("generation") or 0),
            deleting=bool(metadata.get("deletionTimestamp")),
            status=status,
        )

    @property
    def served_model_name(self) -> str:
        return self.spec.model.name or self.name


def describe(error: ValidationError) -> str:
    """pydantic's findings as lines for people: `spec.engine.dtype: Input should be 'auto', … (got 'int3')`."""
    return "; ".join(_line(found) for found in error.errors(include_url=False))


def _line(found: ErrorDetails) -> str:
    kind, context = found["type"], found.get("ctx", {})
    if kind == "value_error" and str(context["error"]).startswith("spec."):
        return str(context["error"])  # one of our rules, which names its field and what to do
    path = "spec" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"])
    if kind in ("missing", "extra_forbidden"):
        return f"{path}: {WORDS[kind]}"
    example = EXAMPLES.get(context.get("pattern", ""))
    words = f"must be {example}" if example else WORDS.get(kind, found["msg"])
    given = repr(found["input"])
    return f"{path}: {words} (got {given if len(given) <= LONGEST else given[:LONGEST] + '…'})"
