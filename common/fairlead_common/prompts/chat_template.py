"""Chat templates, rendered as transformers renders them (transformers/utils/chat_template_utils.py), without transformers.

Templates come with models and are untrusted code: they run in jinja2's immutable sandbox and get plain JSON values only.
"""

import json
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from fairlead_common.errors import PromptError
from fairlead_common.prompts.bounded_template import BoundedEnvironment, RenderingTooLong, bound_steps
from fairlead_common.truncate import truncate

_CONTINUE_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled template. Raises PromptError for the field `chat_template` if it does not compile."""

    def __init__(self, source: str) -> None:
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise PromptError("chat_template", f"the model's chat template does not compile: {truncate(error)}") from error

    def render(self, messages: list[dict[str, Any]], continue_final_message: bool, variables: dict[str, Any]) -> str:
        """Return the prompt text. `messages` are plain JSON objects and stay unchanged.

        Raises PromptError for the field `chat_template` if the rendering takes too many steps, otherwise for the field `messages`.
        """
        messages = [_with_reasoning_names(message) for message in messages]
        final = ""
        if continue_final_message:
            final, messages = _append_tag(messages)
        try:
            with bound_steps():
                text = self._template.render({**variables, "messages": messages})
        except RenderingTooLong as error:
            raise PromptError("chat_template", f"the model's chat template does not end: {error}") from error
        except jinja2.TemplateError as error:
            raise PromptError("messages", f"the model's chat template refused them: {truncate(error)}") from error
        except Exception as error:  # a template is code and can raise anything; the request caused it
            raise PromptError("messages", f"the model's chat template failed on them: {type(error).__name__}: {truncate(error)}") from error
        return _cut_at_tag(text, final) if continue_final_message else text


def _append_tag(messages: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return the last message's text, and the messages with a tag appended to it. The prompt ends where the template writes the tag."""
    last = messages[-1]
    content = last.get("content")
    if isinstance(content, str):
        return content, [*messages[:-1], {**last, "content": content + _CONTINUE_TAG}]
    if isinstance(content, list):
        for at in reversed(range(len(content))):
            if isinstance(content[at], dict) and isinstance(content[at].get("text"), str):
                text = content[at]["text"]
                parts = [*content[:at], {**content[at], "text": text + _CONTINUE_TAG}, *content[at + 1 :]]
                return text, [*messages[:-1], {**last, "content": parts}]
    raise PromptError("continue_final_message", "the last message has no text to continue")


def _cut_at_tag(text: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if tag not in text or final.strip() not in text:
        raise PromptError("continue_final_message", "the model's chat template drops the last message's text: it cannot be continued")
    at = text.rindex(tag)
    if text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return text[:at]
    return text[:at].rstrip()  # the template trims messages, so it would also have trimmed the text without the tag


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under both names that templates read: `reasoning_content`, and `thinking` for gpt-oss.

    Clients send it under one of three names.
    """
    for name in REASONING_FIELDS:
        if message.get(name) is not None:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)  # local time, as in transformers


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Return JSON without the HTML escapes of jinja's own `tojson`: models were not trained on them."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which marks the assistant's text for training masks. It only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


class _Dict:
    """The function `dict` for templates, without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """The class `namespace` for templates. It refuses names that give access to the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `namespace(self=...)` works, as in jinja2
        self, positional = args[0], args[1:]
        values = dict(*positional, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace attribute may not begin with an underscore: {name!r}")
