"""The tiny model with a template that teaches tool calls as Qwen's does, and with added tokens for the markers."""

import json
import shutil
from pathlib import Path

TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call as <tool_call>{"name": …, "arguments": …}</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% elif enable_thinking is defined %}<think>

</think>

{% endif %}{% endif %}"""
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that are not special, as in Qwen 3."""


def make_tool_model(model: Path, folder: Path) -> Path:
    """Copy `model` to `folder` and replace its last tokens with the markers."""
    shutil.copytree(model, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first = len(vocabulary) - len(MARKERS)
    tokenizer["model"]["vocab"] = {token: id for token, id in vocabulary.items() if id < first}
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][: -len(MARKERS)]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for place, marker in enumerate(MARKERS):
        tokenizer["added_tokens"].append({"id": first + place, "content": marker, "special": False, **plain})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
