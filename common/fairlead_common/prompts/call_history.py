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
        flat = {key: call[key] for key in ("name", "arguments") if key in call} if "name" in call else None
        function = call.get("function", flat)
        if not isinstance(function, dict):
            raise PromptError(f"{where}[{at}].function", f"must be an object with name and arguments, not {json_type(function)}")
        if not isinstance(function.get("name"), str):
            raise PromptError(f"{where}[{at}].function.name", f"must be a string, not {json_type(function.get('name'))}")
        function = {**function, "arguments": _convert(function.get("arguments"), form, budget)}
        call = call if flat is None or "function" in call else {"id": call.get("id")}
        # Some templates print the whole call, so its keys keep their order.
        normal.append({**call, "type": call.get("type", "function"), "function": function})
    return normal


def complete_calls(messages: list[Any], names_results: bool = False) -> list[Any]:
    """Return the messages with what templates need of calls and results.

    `function_call` and the role `function` of OpenAI's first API become a call and a result. A call without id gets one, and a result whose
    id names no call gets that of the first call without result. With `names_results` a result gets its function's name. Raises PromptError.
    """
    completed, known, waiting = [], dict[str, Any](), dict[str, Any]()
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            completed.append(message)
            continue
        message = _rename_first_api(message, f"messages[{at}]")
        calls = message.get("tool_calls")
        if message.get("role") == "assistant" and isinstance(calls, list) and calls:
            calls = [_with_id(call, len(known) + number) for number, call in enumerate(calls)]
            message = {**message, "tool_calls": calls}
            waiting |= {str(call["id"]): call["id"] for call in calls if isinstance(call, dict)}
            known |= {str(call["id"]): _function_name(call) for call in calls if isinstance(call, dict)}
        elif message.get("role") == "tool" and known:
            id = str(message.get("tool_call_id"))
            if id not in known and waiting:
                id = next(iter(waiting))
                message = {**message, "tool_call_id": waiting[id]}
            waiting.pop(id, None)
            if names_results and id in known and not message.get("name"):
                message = {**message, "name": known[id]}
        completed.append(message)
    return completed


def _rename_first_api(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message of OpenAI's first API in the form of the present one, and any other message as it is."""
    if message.get("role") == "function":
        return {**message, "role": "tool"}
    if message.get("role") != "assistant" or not message.get("function_call"):
        return message
    rest = {key: value for key, value in message.items() if key != "function_call"}
    if not isinstance(message["function_call"], dict):
        raise PromptError(f"{where}.function_call", "must be an object with name and arguments: send tool_calls instead")
    return rest if message.get("tool_calls") else {**rest, "tool_calls": [{"type": "function", "function": message["function_call"]}]}


def _with_id(call: Any, number: int) -> Any:
    return call if not isinstance(call, dict) or call.get("id") not in (None, "") else {**call, "id": f"call{number:05}"}


def _function_name(call: dict[str, Any]) -> Any:
    function = call.get("function", call)
    return function.get("name") if isinstance(function, dict) else None


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
        value = json.loads(text)
        return value if "\\u" not in text else json.loads(_without_surrogates(json.dumps(value, ensure_ascii=False)))
    except RecursionError:
        return [text]
    except ValueError as error:
        if getattr(error, "msg", "") == "Extra data":  # a partial reading would lose the rest
            return [text]
    try:
        return from_json(raw, allow_partial="trailing-strings")
    except ValueError:
        return [text]


def _without_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, as a cut emoji has them: no tokenizer takes them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
