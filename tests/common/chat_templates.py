"""Chat templates for tests: a small one of each kind, and real ones from `shared/templates` beside the repository, where it is there."""

from pathlib import Path

_FOLDERS = (parent / "shared" / "templates" for parent in Path(__file__).resolve().parents)
REAL = sorted(path for folder in _FOLDERS if folder.is_dir() for path in folder.glob("*.jinja"))

_TEXT = "{{ m.content if m.content is string else '' }}"
_CALLS = "{% for c in m.tool_calls %}<call {{ c.id }}>{{ c.function.name }} {{ ARGUMENTS }}{% endfor %}"
_HEAD = "{% for m in messages %}<{{ m.role }}>"
_OBJECT, _ITEMS = "{{ c.function.arguments | tojson }}", "{% for k, v in c.function.arguments | items %}<{{ k }}>{{ VALUE }}{% endfor %}"


def _calls(arguments: str) -> str:
    return _CALLS.replace("{{ ARGUMENTS }}", arguments)


OWN = {
    # How the arguments of calls are read.
    "object": _HEAD + _TEXT + "{% if m.tool_calls %}" + _calls(_OBJECT) + "{% endif %}{% endfor %}",
    "items": _HEAD + _TEXT + _calls(_ITEMS.replace("VALUE", "v | tojson")) + "{% endfor %}",
    "items printed": _HEAD + _TEXT + _calls(_ITEMS.replace("VALUE", "v")) + "{% endfor %}",
    "joined text": _HEAD + _TEXT + _calls("{{ '' + c.function.arguments }}") + "{% endfor %}",
    "printed text": _HEAD + _TEXT + _calls("{{ c.function.arguments }}") + "{% endfor %}",
    # Whether a key is there.
    "calls defined": _HEAD + "{% if m.tool_calls is defined %}" + _calls(_OBJECT) + "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "one call": _HEAD + "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    + _calls(_OBJECT) + "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    # The content beside calls.
    "content is none": _HEAD + "{% if m.role == 'assistant' and m.content is none %}" + _calls(_OBJECT)
    + "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "content is split": _HEAD + "{{ m.content.split('</think>')[-1] }}" + _calls(_OBJECT) + "{% endfor %}",
    "content is added": "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}",
    "an answer has content": _HEAD + "{% if m.role == 'assistant' and not m.content and not m.tool_calls %}{{ raise_exception('empty') }}"
    "{% endif %}" + _TEXT + _calls(_OBJECT) + "{% endfor %}",
    "no text with thoughts": _HEAD + "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    + _TEXT + _calls(_OBJECT) + "{% endfor %}",
    # Styles of content by role.
    "parts of users": _HEAD + "{% if m.role == 'user' and m.content is not string %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}" + _calls(_OBJECT) + "{% endfor %}",
    "only parts": _HEAD + "{% for p in m.content or [] %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    + _calls(_OBJECT) + "{% endfor %}",
    "one part": _HEAD + "{% if m.content %}{{ m.content[0].text }}{% endif %}" + _calls(_OBJECT) + "{% endfor %}",
    "system first": "{% if messages[0].role == 'system' %}{{ messages[0].content + '' }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}" + _calls(_OBJECT) + "{% endfor %}",
    "a result has content": _HEAD + "{% if m.role == 'tool' and not m.content | trim %}{{ raise_exception('empty') }}{% endif %}" + _TEXT
    + _calls(_OBJECT) + "{% endfor %}",
    "named results": _HEAD + "{% if m.role == 'tool' and m.name is not defined %}{{ raise_exception('name') }}{% endif %}" + _TEXT
    + "{{ m.name or '' }}" + _calls(_OBJECT) + "{% endfor %}{{ tools | length if tools else '' }}",
    "results with tools": _HEAD + "{% if m.role == 'tool' and not tools %}{{ raise_exception('tools') }}{% endif %}" + _TEXT
    + _calls(_OBJECT) + "{% endfor %}",
    "no results": "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>" + _TEXT + _calls(_OBJECT) + "{% endfor %}",
    # Turns, ids and keys.
    "developer first": "{% if messages[0].role in ['system', 'developer'] %}<{{ messages[0].role }}>{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role not in ['system', 'developer'] %}<{{ m.role }}>" + _TEXT + _calls(_OBJECT) + "{% endfor %}",
    "calls between turns": "{% set ns = namespace(at=0) %}{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.at % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}{% set ns.at = ns.at + 1 %}"
    "<{{ m.role }}>" + _TEXT + "{% else %}<{{ m.role }}>{% if m.role == 'tool' %}{{ m.content }}{% endif %}" + _calls(_OBJECT)
    + "{% endif %}{% endfor %}",
    "results of calls": _HEAD + "{% if m.role == 'assistant' and m.tool_calls and (loop.last or loop.nextitem.role != 'tool') %}"
    "{{ raise_exception('no result') }}{% endif %}{% if m.role == 'tool' and (loop.first or loop.previtem.role not in ['tool', "
    "'assistant']) %}{{ raise_exception('no call') }}{% endif %}" + _TEXT + _calls(_OBJECT) + "{% endfor %}",
    "a question somewhere": "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no question') }}"
    "{% endif %}" + _HEAD + _TEXT + _calls(_OBJECT) + "{% endfor %}",
    "thinking parts": _HEAD + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}"
    "{% if p.type == 'thinking' %}<think>{{ p.thinking }}</think>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    + _calls(_OBJECT) + "{% endfor %}",
    "one answer": _HEAD + "{% if m.role == 'assistant' and not loop.first and loop.previtem.role == m.role %}"
    "{{ raise_exception('two answers') }}{% endif %}" + _TEXT + _calls(_OBJECT) + "{% endfor %}",
    "whole calls": _HEAD + _TEXT + "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}",
    "short ids": _HEAD + _TEXT + "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}{% endfor %}"
    "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('id') }}{% endif %}" + _calls(_OBJECT) + "{% endfor %}",
}  # fmt: skip

STRICT = """\
{%- if messages[0].role == 'system' %}{{ '[S]' + messages[0].content }}{% set messages = messages[1:] %}{% endif -%}
{%- for message in messages -%}
{%- if message.role not in ('user', 'assistant') or (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate') }}
{%- endif -%}
{{ '[' + message.role + ']' + message.content }}
{%- endfor -%}
"""
"""Of the kind of Mistral's and Gemma's."""
