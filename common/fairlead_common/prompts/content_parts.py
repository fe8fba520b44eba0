"""The texts of a message's content, in the shapes that clients send."""

from typing import Any, Final

from fairlead_common.errors import PromptError
from fairlead_common.truncate import quote

_TEXT_FIELDS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of content parts that are text, with the field that has it. They are OpenAI's names, Anthropic's and Mistral's."""


def read_texts(content: Any, where: str) -> list[str]:
    """Return the texts of a content's parts: one for a string. Raises PromptError for the field `where`."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise PromptError(where, f"must be a string or a list of text parts, not {json_type(content)}")
    return [_read_part(part, f"{where}[{at}]") for at, part in enumerate(content)]


def _read_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise PromptError(where, f"must be a string or an object with type and text, not {json_type(part)}")
    kind = part.get("type", "text")
    field = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise PromptError(f"{where}.type", f"is {quote(kind)}: this model reads text only")
    text = part.get(field)
    if field == "thinking" and isinstance(text, list):  # Mistral's form: the thoughts are parts
        return "\n".join(read_texts(text, f"{where}.thinking"))
    if not isinstance(text, str):
        raise PromptError(f"{where}.{field}", f"must be a string, not {json_type(text)}")
    return text


def json_type(value: Any) -> str:
    """Return the name of a JSON value's type for error messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
