"""The texts of a message's content, in the shapes that clients send."""

from typing import Any, Final

from fairlead_common.errors import PromptError
from fairlead_common.prompts.plain_text import describe_part
from fairlead_common.truncate import quote

_TEXT_FIELDS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Types of content parts that are text, with the field that has it. They are OpenAI's names."""
_THOUGHTS: Final = ("thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text")
"""Types of parts that are reasoning, of Anthropic, Mistral, OpenAI and LangChain."""


def read_texts(content: Any, where: str, in_thought: bool = False) -> list[str]:
    """Return the texts of a content's parts: one for a string. Raises PromptError for the field `where`.

    `in_thought`: the parts are those of reasoning, and none of them may have parts.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise PromptError(where, f"must be a string or a list of text parts, not {json_type(content)}")
    return [_read_part(part, f"{where}[{at}]", in_thought) for at, part in enumerate(content)]


def _read_part(part: Any, where: str, in_thought: bool) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise PromptError(where, f"must be a string or an object with type and text, not {json_type(part)}")
    kind = part.get("type") or "text"
    if kind in _THOUGHTS:
        return _read_thought(part, where, in_thought)
    field = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise PromptError(f"{where}.type", f"is {quote(kind)}: this model reads text only")
    text = part.get(field)
    if not isinstance(text, str):
        raise PromptError(f"{where}.{field}", f"must be a string, not {json_type(text)}")
    return text


def _read_thought(part: dict[str, Any], where: str, in_thought: bool = False) -> str:
    """Return the text of reasoning, or "" for reasoning that only its issuer can read. Some have the text in parts."""
    field = next((name for name in ("thinking", "reasoning", "text", "content", "summary") if part.get(name)), None)
    if field is None:
        return ""
    if in_thought and not isinstance(part[field], str):
        raise PromptError(f"{where}.{field}", f"must be a string inside other reasoning, not {json_type(part[field])}")
    return "\n".join(read_texts(part[field], f"{where}.{field}", in_thought=True))


def split_thoughts(content: list[Any], where: str) -> tuple[list[Any], str]:
    """Return the parts of an answer that are no reasoning, and the text of those that are."""
    thoughts = {at: _read_thought(part, f"{where}[{at}]") for at, part in enumerate(content) if _has_type(part, _THOUGHTS)}
    if not thoughts:
        return content, ""
    read_texts(content, where)  # an error names the part by its place here
    return [part for at, part in enumerate(content) if at not in thoughts], "\n".join(filter(None, thoughts.values()))


def replace_media(content: Any) -> Any:
    """Return a content with a text in place of each part that is not text."""
    if not isinstance(content, list):
        return content
    kept = (*_TEXT_FIELDS, *_THOUGHTS)
    is_other = [isinstance(part, dict) and isinstance(part.get("type"), str) and not _has_type(part, kept) for part in content]
    return [{"type": "text", "text": describe_part(part)} if other else part for part, other in zip(content, is_other, strict=True)]


def _has_type(part: Any, kinds: tuple[str, ...]) -> bool:
    return isinstance(part, dict) and part.get("type", "text") in kinds


def json_type(value: Any) -> str:
    """Return the name of a JSON value's type for error messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
