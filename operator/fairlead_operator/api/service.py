"""An InferenceService as the operator and `fairlead up` use it: parsed, typed, immutable."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fairlead_operator.api.fields import EXAMPLES, GROUP_NAME_HELP, GROUP_NAME_LENGTH, NAME, NAME_HELP, NAME_LENGTH, WORDS, similar_field
from fairlead_operator.api.model import MODELS_NAME
from fairlead_operator.api.spec import ServiceSpec
from fairlead_operator.api.status import ServiceStatus

MAX_QUOTED = 80
"""Characters of an invalid value that an error message quotes."""


class InvalidManifest(ValueError):
    """The manifest is invalid. The message names each field and its problem."""


@dataclass(frozen=True)
class InferenceService:
    """One service: its identity, its spec and its last status."""

    name: str
    namespace: str
    spec: ServiceSpec
    uid: str = ""
    generation: int = 0
    deleting: bool = False
    status: ServiceStatus = field(default_factory=ServiceStatus)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> "InferenceService":
        """Parse a manifest or an API object. Raises InvalidManifest, rarely for API objects, since the API server validates them first."""
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
        if spec.engine.nodes > 1 and len(name) + len(str(spec.most_replicas - 1)) > GROUP_NAME_LENGTH:
            raise InvalidManifest(f"{GROUP_NAME_HELP} (got {len(name)} characters)")
        if spec.model.name is None and name in {one.name for one in spec.model.adapters}:
            raise InvalidManifest(f"{MODELS_NAME} (it is {name!r}, the name of the service)")
        try:
            status = ServiceStatus.model_validate(body.get("status") or {})
        except ValidationError:
            status = ServiceStatus()  # another version of the operator wrote it; the next reconcile writes it again
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
    """Return the errors of pydantic as text: `spec.engine.dtype: Input should be 'Auto', … (got 'Int3')`."""
    return "; ".join(_line(found) for found in error.errors(include_url=False))


def _line(found: ErrorDetails) -> str:
    kind, context = found["type"], found.get("ctx", {})
    if kind == "value_error" and str(context["error"]).startswith("spec."):
        return str(context["error"])  # a rule of these models; its message names the field and the fix
    path = "spec" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"])
    if kind == "missing":
        return f"{path}: {WORDS[kind]}"
    if kind == "extra_forbidden":
        similar = similar_field(ServiceSpec, found["loc"])
        return f"{path}: {WORDS[kind]}" + (f"; did you mean {similar}?" if similar else "")
    example = EXAMPLES.get(context.get("pattern", ""))
    words = f"must be {example}" if example else WORDS.get(kind, found["msg"])
    given = repr(found["input"])
    return f"{path}: {words} (got {given if len(given) <= MAX_QUOTED else given[:MAX_QUOTED] + '…'})"
