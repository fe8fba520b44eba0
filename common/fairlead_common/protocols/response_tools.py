"""Tools of the Responses API, as functions of a chat."""

from typing import Any

from fairlead_common.prompts.content_parts import json_type
from fairlead_common.prompts.other_calls import custom_function
from fairlead_common.protocols.conversion import OfferedTool, Omissions
from fairlead_common.protocols.fields import iterate_objects, refuse, require_text
from fairlead_common.protocols.known_tools import LOCAL_SHELL
from fairlead_common.truncate import quote


def flat_name(name: str, namespace: Any) -> str:
    """Return the chat's name of a tool: two namespaces can have tools of one name."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


class ToolReader:
    """Collects the tools of a request. All are offered at once, so `defer_loading` has no effect."""

    def __init__(self, omissions: Omissions) -> None:
        self.tools: list[dict[str, Any]] = []
        """Of the chat."""
        self.fields: list[str] = []
        """The field of the body for each tool."""
        self.offered: dict[str, OfferedTool] = {}
        """Tools with another form in the API, by their name in the chat."""
        self._omissions = omissions
        self._names: set[str] = set()

    def add(self, given: Any, where: str, namespace: str | None = None, skips_known: bool = False) -> None:
        """Add a list of tools. `skips_known`: a tool whose name is known is the same tool. Raises PromptError for a malformed tool."""
        for at, tool in iterate_objects(given, where):
            match tool.get("type"):
                case "function":
                    self._offer(tool, at, OfferedTool("function", require_text(tool, "name", at), namespace), skips_known)
                case "custom":
                    custom = OfferedTool("custom", require_text(tool, "name", at), namespace)
                    self._offer(custom_function(tool), at, custom, skips_known)
                case "namespace" if namespace is None:
                    if tool.get("description"):
                        self._omissions.leave_out(f"{at}.description")
                    self.add(tool.get("tools") or [], f"{at}.tools", require_text(tool, "name", at), skips_known)
                case "local_shell":
                    description, schema = LOCAL_SHELL
                    self._offer({"description": description, "parameters": schema}, at, OfferedTool("local_shell", "local_shell"), True)
                case "tool_search" if tool.get("execution") == "client" and isinstance(tool.get("parameters"), dict):
                    self._offer(tool, at, OfferedTool("tool_search", "tool_search"), True)
                case str() as kind:
                    self._omissions.leave_out(at, kind)
                case kind:
                    refuse(f"{at}.type", f"must be a string such as 'function', not {json_type(kind)}")

    def choose(self, choice: str | dict[str, Any] | None) -> Any:
        """Return the chat's tool_choice."""
        if not isinstance(choice, dict):
            return choice
        match choice.get("type"):
            case "function" | "custom":
                return _function_choice(require_text(choice, "name", "tool_choice"), choice.get("namespace"))
            case "allowed_tools":
                mode = choice.get("mode", "auto")
                if mode not in ("auto", "required"):
                    refuse("tool_choice.mode", f"is {quote(mode)}; it must be auto or required")
                allowed = []
                for where, tool in iterate_objects(choice.get("tools"), "tool_choice.tools"):
                    kind = tool.get("type", "function")
                    if kind in ("function", "custom"):
                        allowed.append(_function_choice(require_text(tool, "name", where), tool.get("namespace")))
                    elif isinstance(kind, str) and kind in self.offered:
                        allowed.append(_function_choice(kind, None))
                    else:
                        self._omissions.leave_out(where, kind)
                return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
            case kind:
                reason = "cannot be called here; give none, auto, required, a function, a custom tool or allowed_tools"
                return refuse("tool_choice.type", f"{quote(kind)} {reason}")

    def _offer(self, function: dict[str, Any], where: str, tool: OfferedTool, skips_known: bool) -> None:
        name = flat_name(tool.name, tool.namespace)
        if skips_known and name in self._names:
            return
        fields = {field: function[field] for field in ("description", "parameters", "strict") if function.get(field) is not None}
        self._names.add(name)
        self.tools.append({"type": "function", "function": {"name": name, **fields}})
        self.fields.append(where)
        if tool.kind != "function" or tool.namespace is not None:
            self.offered[name] = tool


def _function_choice(name: str, namespace: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": flat_name(name, namespace)}}
