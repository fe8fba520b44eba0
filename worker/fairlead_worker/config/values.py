"""Values of settings: objects with several keys, as `--limits` and `--speculative-config` are, and model URIs."""

import difflib
import json
import re
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, model_validator

_URI: Final = r"hf://[\w.-]+(/[\w.-]+)?((/[\w.-]+)+\.gguf)?(@[\w./-]+)?|(?:s3|gs)://[\w.-]+(/[\w.=+-]+)*/?|file:///.+"
_URI_OCI: Final = r"oci://[A-Za-z0-9][A-Za-z0-9.:/_-]*(@sha256:[0-9a-f]{64})?(#[A-Za-z0-9._/-]+)?"
_REPOSITORY: Final = r"[\w.-]+/[\w.-]+((/[\w.-]+)+\.gguf)?(@[\w./-]+)?"


class ConfigObject(BaseModel):
    """A frozen object whose keys are its fields. An unknown key is an error that names the known ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any) -> Any:
        if isinstance(data, dict) and (unknown := [str(key) for key in data if key not in cls.model_fields]):
            close = difflib.get_close_matches(unknown[0], cls.model_fields, 1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"unknown key {unknown[0]!r}{meant}; the keys are {', '.join(cls.model_fields)}")
        return data


def parse_json(value: Any) -> Any:
    """Return the object of a JSON text. Values that are not texts stay. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except ValueError as error:
        raise ValueError(f"is no JSON object ({error})") from None
    if not isinstance(found, dict):
        raise ValueError("is no JSON object")
    return found


def parse_json_or_list(value: Any) -> Any:
    """Return the object of a JSON text or of a list `key=value,key=value`. Values that are not texts stay. Raises ValueError."""
    if not isinstance(value, str) or value.lstrip().startswith("{"):
        return parse_json(value)
    found: dict[str, str] = {}
    for part in value.split(",") if value.strip() else ():
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals or not key:
            raise ValueError(f"{part.strip()!r} is not KEY=VALUE; give a list KEY=VALUE,KEY=VALUE or a JSON object")
        found[key] = text
    return found


def to_upper(value: Any) -> Any:
    """Return a text in capitals, for names that may be given in lower case. Values that are not texts stay."""
    return value.upper() if isinstance(value, str) else value


def to_model_uri(value: str) -> str:
    """Return the URI of a model that a user names: a URI, a folder or GGUF file of this machine, or ORG/NAME[/FILE.gguf] on the hub.

    An existing folder or file wins over a repository of the same name. Raises ValueError for anything else.
    """
    if re.fullmatch(f"{_URI}|{_URI_OCI}", value):
        return value
    folder = Path(value).expanduser()
    if folder.exists() or re.match(r"[./~]", value):  # a path of a missing folder too, so that the error names that folder
        return (folder.resolve() if ".." in folder.parts else folder.absolute()).as_uri()  # a link keeps its name, the model's default name
    if re.fullmatch(_REPOSITORY, value):
        return f"hf://{value}"
    raise ValueError(
        "is no folder or file here and no model URI; give a folder, FILE.gguf, ORG/NAME, hf://org/name[/FILE.gguf][@revision], "
        "s3://bucket/folder, gs://bucket/folder, oci://image[#folder] or file:///path"
    )
