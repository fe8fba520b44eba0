"""Tool calls of earlier answers, in the form that a template reads.

A model may have written anything as arguments, and an answer may have been cut. The client sends back what it got, so that every text must
render.
"""

import json
from hashlib import blake2b
from typing import Any

from pydantic_core import from_json

from fairlead_common.errors import PromptError
from fairlead_common.json_size import MAX_OBJECTS, JsonSize, JsonTooLarge, check_json
from fairlead_common.prompts.content_parts import json_type
from fairlead_common.prompts.template_probe import ArgumentForm

_NO_ARGUMENTS = ("", "null", '""')


class ArgumentBudget:
    """Bound on the JSON in the strings of all tool calls of a request, which its own size does not count."""

    def __init__(self) -> None:
        self._left = MAX_OBJECTS

    def spend(self, size: JsonSize) -> None:
        """Raise PromptError once the strings have too many objects together."""
        self._left -= size.objects
        if self._left < 0:
            reason = f"the arguments of the tool calls have more than {MAX_OBJECTS} JSON objects, lists and keys: send fewer"
            raise PromptError("messages", reason)


def normalize_calls(calls: Any, where: str, form: ArgumentForm, budget: ArgumentBudget) -> list[dict[str, Any]]:
    """Validate tool calls and convert their arguments to a form. OpenAI sends a JSON string; most templates expect the object in it."""
    if not isinstance(calls, list):
        raise PromptError(where, f"must be a list, not {json_type(calls)}")
    normal = []
    for at, call in enumerate(calls):
        if not isinstance(call, dict):
            raise PromptError(f"{where}[{at}]", f"must be an object, not {json_type(call)}")
        call = {key: value for key, value in call.items() if value is not None}
        function = call.get("function", call if "name" in call else None)
        if not isinstance(function, dict):
            raise PromptError(f"{where}[{at}].function", f"must be an object with name and arguments, not {json_type(function)}")
        if not isinstance(function.get("name"), str):
            raise PromptError(f"{where}[{at}].function.name", f"must be a string, not {json_type(function.get('name'))}")
        function = {**function, "arguments": _convert(function.get("arguments"), form, budget)}
        normal.append(function if "function" not in call else {**call, "function": function})
    return normal


def short_id(id: str) -> str:
    """Return an id of nine letters and digits: the same one if it is of this form, else always the same for an id, as of another server."""
    return id if len(id) == 9 and id.isascii() and id.isalnum() else blake2b(id.encode(errors="replace"), digest_size=5).hexdigest()[:9]


def write_call(call: dict[str, Any]) -> str:
    """Return a call as text in Hermes' format, for a template that would leave it out."""
    function = call.get("function", call)
    return f"<tool_call>\n{json.dumps({'name': function['name'], 'arguments': function['arguments']}, ensure_ascii=False)}\n</tool_call>"


def _convert(given: Any, form: ArgumentForm, budget: ArgumentBudget) -> Any:
    if form == "text":
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return "{}" if text.strip() in _NO_ARGUMENTS else text
    arguments = _read_object(given, budget)
    if form == "object":
        return arguments
    return {key: json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value for key, value in arguments.items()}


def _read_object(given: Any, budget: ArgumentBudget) -> dict[str, Any]:
    """Return arguments as an object. What is none becomes the object's only value, as text: a template prints that unchanged."""
    value, encodings = given, 0
    while isinstance(value, str) and value.strip() and encodings < 2:  # some clients encode the text twice
        value, encodings = _decode(value, budget), encodings + 1
    if isinstance(value, dict):
        return value
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    return {"arguments": given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)}


def _decode(text: str, budget: ArgumentBudget) -> Any:
    """Return the JSON value of a text, also of one that was cut; of any other text, the text in a list."""
    raw = text.encode(errors="replace")
    try:
        budget.spend(check_json(raw))
    except JsonTooLarge:
        return [text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return from_json(raw, allow_partial="trailing-strings")
    except ValueError:
        return [text]
