"""Tools for chat templates that do not render them, in the format of Hermes.

Such a template drops a request's tools silently: the model does not see them, and a forced call is a guess (SmolLM2 called `add` for a
question about the weather). llama.cpp writes tools into the prompt for such templates too.
"""

from typing import Final

_REWRITE: Final = """\
{%- if tools or messages | selectattr('tool_calls', 'defined') | list %}
{%- set instructions %}{% if tools %}
You may call these functions:
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools>
For each call, write a JSON object with the function's name and arguments within tags:
<tool_call>
{"name": "function", "arguments": {"key": "value"}}
</tool_call>
{% endif %}{% endset %}
{%- set rewritten = namespace(messages=[], text='') %}
{%- set as_text = (messages[0].content or '') is string %}
{%- for message in messages %}
{%- set given = message.content or '' %}
{%- set current = namespace(text=given if given is string else given | map(attribute='text') | join('\\n')) %}
{%- for call in message.tool_calls or [] %}
{%- set written = {'name': call.function.name, 'arguments': call.function.arguments} | tojson %}
{%- set current.text = current.text + ('\\n' if current.text else '') + '<tool_call>\\n' + written + '\\n</tool_call>' %}
{%- endfor %}
{%- if message.role == 'tool' %}{% set current.text = '<tool_response>\\n' + current.text + '\\n</tool_response>' %}{% endif %}
{%- if loop.first and message.role == 'system' %}{% set current.text = current.text + '\\n\\n' + instructions.strip() %}
{%- elif loop.first %}{% set current.text = instructions + '\\n' + current.text %}{% endif %}
{%- set joins = not loop.first and loop.previtem.role == 'tool' and message.role in ['tool', 'user'] %}
{%- set rewritten.text = rewritten.text + '\\n' + current.text if joins else current.text %}
{%- set content = rewritten.text if as_text else [{'type': 'text', 'text': rewritten.text}] %}
{%- set role = 'user' if message.role == 'tool' else message.role %}
{%- set others = message.items() | rejectattr(0, 'equalto', 'tool_calls') %}
{%- set before = rewritten.messages[:-1] if joins else rewritten.messages %}
{%- set rewritten.messages = before + [dict(others, role=role, content=content)] %}
{%- endfor %}
{%- set messages = rewritten.messages %}
{%- endif %}
"""
"""The instructions are in the first message, whichever role it has: some templates have no system messages. Consecutive results and the
user's next message are one user message: some templates require that roles alternate. `tool_calls` are not kept: a template may render
them without `tools`, and each call would be in the prompt twice."""


def build_tool_template(chat_template: str) -> str:
    """Return the template for requests with tools; "" if `chat_template` renders tools itself, or is empty."""
    return _REWRITE + chat_template if chat_template and "tools" not in chat_template else ""
