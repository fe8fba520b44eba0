"""The answer's format: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*` fields."""

from typing import Any

import msgspec

from fairlead_common.json_size import JsonTooLarge, check_json
from fairlead_common.truncate import quote, truncate
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.output.parsers import ANY_OBJECT
from fairlead_worker.api.schema import CommonRequest
from fairlead_worker.grammar.constraint import Constraint, Kind

MAX_CHOICES = 1024
FORMATS = ("text", "json_object", "json_schema", "structural_tag")
OPTIONS = ("disable_any_whitespace", "whitespace_pattern")
"""Keys of `structured_outputs` beside the format itself."""
GUIDED: dict[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""vLLM's older fields, and SGLang's."""


def parse_constraint(request: CommonRequest) -> Constraint | None:
    """Return the request's one answer format, or None without one. Raise ApiError 400."""
    found: list[Constraint] = []
    if request.response_format is not None and (constraint := _parse_response_format(request.response_format)) is not None:
        found.append(constraint)
    if request.structured_outputs is not None:
        found.append(_parse_structured_outputs(request.structured_outputs))
    for field, kind in GUIDED.items():
        if (value := getattr(request, field)) is not None:
            found.append(_build_constraint(kind, value, field, request.guided_whitespace_pattern))
    if len(found) > 1:
        names = ", ".join(each.field for each in found)
        raise invalid(f"{found[1].field}: an answer can have one form only, but {names} each ask for one", param=found[1].field)
    return found[0] if found else None


def _parse_response_format(given: dict[str, Any]) -> Constraint | None:
    kind = (given or {"type": "text"}).get("type")
    field = "response_format"
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json", ANY_OBJECT, field)
    if kind == "structural_tag":
        return _build_constraint("structural_tag", given, field)
    if kind != "json_schema":
        raise invalid(f"response_format.type: {quote(kind)} is none of {', '.join(FORMATS)}", param="response_format.type")
    field = "response_format.json_schema"
    described = given.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict | bool):
        raise invalid(f'{field}: needs a schema, as in {{"name": "answer", "schema": {{…}}}}', param=field)
    return _build_constraint("json", described["schema"], f"{field}.schema")


def _parse_structured_outputs(given: dict[str, Any]) -> Constraint:
    field = "structured_outputs"
    given_options = {name: value for name, value in given.items() if value is not None and value is not False and name not in OPTIONS}
    kinds = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
    forms = [name for name in kinds if name in given_options]
    if unknown := sorted(set(given_options) - set(kinds) - {"disable_fallback", "disable_additional_properties"}):
        raise invalid(f"{field}: {unknown[0]:.60} is not supported; supported are {', '.join(kinds)}, {', '.join(OPTIONS)}", param=field)
    if given_options.get("disable_additional_properties"):
        raise invalid(f'{field}.disable_additional_properties: not supported; say "additionalProperties": false in the schema', param=field)
    if len(forms) != 1:
        raise invalid(f"{field}: needs exactly one of {', '.join(kinds)}, not {len(forms)}", param=field)
    (form,) = forms
    whitespace = given.get("whitespace_pattern")
    if whitespace is not None and not isinstance(whitespace, str):
        raise invalid(f"{field}.whitespace_pattern: must be a string", param=f"{field}.whitespace_pattern")
    if given.get("disable_any_whitespace"):
        whitespace = ""
    if form == "json_object":
        return Constraint("json", ANY_OBJECT, f"{field}.{form}", whitespace)
    return _build_constraint(form, given_options[form], f"{field}.{form}", whitespace)  # type: ignore[arg-type]  # the names of kinds


def _build_constraint(kind: Kind, value: Any, field: str, whitespace: str | None = None) -> Constraint:
    """Check what the field's own type does not express, and return the constraint."""
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value) or len(value) > MAX_CHOICES:
            raise invalid(f"{field}: must be a list of 1 to {MAX_CHOICES} strings", param=field)
        if "" in value:
            raise invalid(f"{field}: must not contain an empty string", param=field)
    elif kind in ("json", "structural_tag"):
        if isinstance(value, str):
            try:
                check_json(value.encode())
                value = msgspec.json.decode(value)
            except JsonTooLarge as error:
                raise invalid(f"{field}: is too large to decode: {error}", param=field) from None
            except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
                raise invalid(f"{field}: is not JSON: {truncate(error)}", param=field) from None
        if not isinstance(value, dict | bool):
            raise invalid(f"{field}: must be a JSON schema, an object", param=field)
        if kind == "structural_tag" and not isinstance(value, dict):
            raise invalid(f"{field}: must be an object", param=field)
    elif not isinstance(value, str) or not value:
        raise invalid(f"{field}: must be a string that is not empty", param=field)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return Constraint(kind, text, field, whitespace)
