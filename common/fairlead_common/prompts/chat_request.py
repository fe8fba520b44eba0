"""Map a chat request's fields to its prompt. Router and worker share it, so that both tokenize the same text."""

from typing import Any, Protocol

from fairlead_common.prompts.other_calls import as_functions, as_tool_calls


class ChatFields(Protocol):
    """The fields that affect a prompt. The router has them unvalidated, of any type."""

    @property
    def messages(self) -> Any: ...
    @property
    def tools(self) -> Any: ...
    @property
    def tool_choice(self) -> Any: ...
    @property
    def add_generation_prompt(self) -> Any: ...
    @property
    def continue_final_message(self) -> Any: ...
    @property
    def chat_template(self) -> Any: ...
    @property
    def chat_template_kwargs(self) -> Any: ...
    @property
    def documents(self) -> Any: ...
    @property
    def add_special_tokens(self) -> Any: ...
    @property
    def reasoning_effort(self) -> Any: ...


def build_encode_kwargs(body: ChatFields) -> dict[str, Any]:
    """Return the arguments of `PromptEncoder.encode_chat`.

    `tool_choice` "none" leaves the tools out of the prompt, so that the model cannot call them.
    """
    continues = bool(body.continue_final_message)
    return {
        "messages": as_tool_calls(body.messages),
        "tools": None if body.tool_choice == "none" else as_functions(body.tools) or None,
        "add_generation_prompt": not continues if body.add_generation_prompt is None else bool(body.add_generation_prompt),
        "continue_final_message": continues,
        "template_kwargs": _template_kwargs(body),
        "template": body.chat_template,
        "add_special_tokens": body.add_special_tokens is True,
    }


def _template_kwargs(body: ChatFields) -> Any:
    """Add `reasoning_effort` to the template's variables unless `chat_template_kwargs` sets it.

    "none" also turns reasoning off in templates that have a switch: Qwen's is called `enable_thinking`, DeepSeek's `thinking`.
    """
    given, effort = body.chat_template_kwargs, body.reasoning_effort
    if body.documents is not None and isinstance(given, dict | None):
        given = {**(given or {}), "documents": body.documents}
    if not isinstance(effort, str) or not isinstance(given, dict | None):
        return given
    switches = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **switches, **(given or {})}
