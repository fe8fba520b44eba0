"""Tools of a chat request: which the answer may call, which it must call, and the grammar for it. Every error names the field."""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from fairlead_common.prompts.other_calls import custom_function
from fairlead_common.truncate import quote
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.schema import ChatRequest
from fairlead_worker.grammar.constraint import Constraint
from fairlead_worker.parsing.stage import Tools

MAX_TOOLS = 512
"""OpenAI allows 128."""
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""OpenAI's names, plus the dots and colons that tool servers put into theirs."""
_CHOICES = "none, auto, required, {type: function, function: {name}}, or {type: allowed_tools, allowed_tools: {mode, tools}}"
_ANY_OBJECT = {"type": "object"}
_NO_PARAMETERS: dict[str, Any] = {"properties": {}}
"""OpenAI's meaning of a function without `parameters`. Without it a model that must call one invents some."""


@dataclass(frozen=True, slots=True)
class Function:
    """One tool."""

    name: str
    parameters: dict[str, Any]
    strict: bool
    field: str
    """Path of the function in the request, for errors."""
    is_custom: bool = False
    """True for a custom tool, whose only argument is its input."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tool-call rules of a request."""

    functions: tuple[Function, ...] = ()
    """Functions that the answer may call. Empty: calls are not allowed."""
    is_required: bool = False
    """True if the answer must be a call."""
    required_function: str = ""
    """The function that the answer must call. Empty: any of `functions`."""
    at_most_one: bool = False
    """True if the answer may have one call at most."""

    @property
    def custom_names(self) -> frozenset[str]:
        """The names of the custom tools."""
        return frozenset(function.name for function in self.functions if function.is_custom)

    @property
    def tools(self) -> Tools:
        return Tools({function.name: function.parameters for function in self.functions}, self.at_most_one)

    @property
    def _schema_fields(self) -> tuple[str, ...]:
        return tuple(f"{function.field}.parameters" for function in self.functions)

    def build_constraint(self) -> Constraint | None:
        """Return the constraint of an answer that consists of calls only, or None if it may be something else."""
        if not self.is_required:
            return None
        if self.required_function:
            function = self.functions[0]
            return Constraint("json", _to_json(_ANY_OBJECT | function.parameters), f"{function.field}.parameters")
        listed = [{"name": each.name, "schema": _ANY_OBJECT | each.parameters} for each in self.functions]
        return Constraint("calls", _to_json({"tools": listed, "one": self.at_most_one}), "tools", fields=self._schema_fields)

    def build_strict_tags(self, calls: str) -> Constraint | None:
        """Return the constraint for optional calls of `strict` functions: their arguments follow the schema, in the tool format `calls`."""
        if calls != "hermes" or self.is_required or not any(function.strict for function in self.functions):
            return None
        structures = [
            {
                "begin": f'<tool_call>\n{{"name": "{each.name}", "arguments": ',
                "schema": _ANY_OBJECT | (each.parameters if each.strict else {}),
                "end": "}\n</tool_call>",
            }
            for each in self.functions
        ]
        return Constraint(
            "structural_tag", _to_json({"structures": structures, "triggers": ["<tool_call>"]}), "tools", fields=self._schema_fields
        )


def parse_tool_use(request: ChatRequest) -> ToolUse:
    """Parse a request's `tools` and `tool_choice`. Raise ApiError 400 that names the field."""
    if not request.tools and request.tool_choice is None:
        return ToolUse()
    functions = [_parse_function(tool, f"tools[{at}]") for at, tool in enumerate(request.tools or ())]
    if len(functions) > MAX_TOOLS:
        raise invalid(f"tools: at most {MAX_TOOLS}, not {len(functions)}", param="tools")
    by_name: dict[str, Function] = {}
    for function in functions:
        if function.name in by_name:
            raise invalid(f"{function.field}.name: {quote(function.name)} appears twice", param=f"{function.field}.name")
        by_name[function.name] = function
    at_most_one = request.parallel_tool_calls is False
    choice = request.tool_choice
    match choice:
        case "none":
            return ToolUse()
        case None | "auto":
            return ToolUse(tuple(functions), at_most_one=at_most_one)
        case "required":
            return ToolUse(_require_some(functions), is_required=True, at_most_one=at_most_one)
        case {"type": "function" | "custom" as kind} if isinstance(name := _chosen_name(choice, kind), str):
            return ToolUse(
                (_find_function(by_name, name, f"tool_choice.{kind}.name"),), is_required=True, required_function=name, at_most_one=True
            )
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(listed)}}:
            chosen = _parse_allowed_tools(by_name, listed)
            return ToolUse(_require_some(chosen) if mode == "required" else chosen, is_required=mode == "required", at_most_one=at_most_one)
    raise invalid(f"tool_choice: must be one of {_CHOICES}", param="tool_choice")


def _parse_function(tool: dict[str, Any], field: str) -> Function:
    kind = tool.get("type", "function")
    if kind not in ("function", "custom"):
        raise invalid(f"{field}.type: {quote(kind)} is not supported; only function and custom are", param=f"{field}.type")
    where = f"{field}.{kind}"
    function = tool.get(kind)
    if not isinstance(function, dict):
        raise invalid(f'{where}: must be an object, as in {{"name": "now", "parameters": {{…}}}}', param=where)
    if kind == "custom":
        function = custom_function(function)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"{where}.name: must be 1 to 128 letters, digits, '_', '-', '.' or ':'", param=f"{where}.name")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise invalid(f"{where}.parameters: must be a JSON schema, an object", param=f"{where}.parameters")
    if (parameters or {}).get("type", "object") != "object":
        raise invalid(f"{where}.parameters.type: must be object: arguments have names", param=f"{where}.parameters.type")
    if not isinstance(function.get("description"), str | None):
        raise invalid(f"{where}.description: must be a string", param=f"{where}.description")
    if not isinstance(function.get("strict"), bool | None):
        raise invalid(f"{where}.strict: must be true or false", param=f"{where}.strict")
    return Function(name, parameters or _NO_PARAMETERS, bool(function.get("strict")), where, is_custom=kind == "custom")


def _chosen_name(choice: Any, kind: str) -> Any:
    return choice[kind].get("name") if isinstance(choice.get(kind), dict) else None


def _require_some(functions: "list[Function] | tuple[Function, ...]") -> tuple[Function, ...]:
    if not functions:
        raise invalid("tool_choice: a call is required, but there are no tools to call", param="tool_choice")
    return tuple(functions)


def _find_function(by_name: dict[str, Function], name: str, field: str) -> Function:
    if name not in by_name:
        raise invalid(f"{field}: {quote(name)} is none of the request's tools", param=field)
    return by_name[name]


def _parse_allowed_tools(by_name: dict[str, Function], listed: list[Any]) -> tuple[Function, ...]:
    chosen: dict[str, Function] = {}
    for at, each in enumerate(listed):
        field = f"tool_choice.allowed_tools.tools[{at}]"
        match each:
            case {"type": "function" | "custom" as kind} if isinstance(name := _chosen_name(each, kind), str):
                chosen[name] = _find_function(by_name, name, f"{field}.{kind}.name")
            case _:
                raise invalid(f"{field}: must be {{type: function, function: {{name}}}}", param=field)
    return tuple(chosen.values())


def _to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
