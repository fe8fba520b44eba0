"""Prompts compared token for token with transformers, with a tokenizer trained here."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fairlead_common.prompts.encoder import PromptEncoder, PromptError, PromptFormat

CHATML = """{% for message in messages %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if strict_roles is defined and messages[0]['role'] not in ['system', 'user'] %}{{ raise_exception('bad role') }}{% endif %}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Unknown role: ' + message['role']) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- elif message.content %}
        {%- set content = '' %}
        {%- for part in message.content %}{%- set content = content + part.text %}{%- endfor %}
        {%- set content = message.content | map(attribute='text') | join('') %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content and enable_thinking is not false %}
        {{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
    {%- generation %}{{- content }}{%- endgeneration %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- if loop.index0 > 3 %}{%- break %}{%- endif %}
            {{- '\\n<tool_call>' }}
            {{- {"name": call.function.name, "arguments": call.function.arguments} | tojson(indent=2) }}{{- '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
    {%- if loop.index0 == ns.last %}{{- eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

PARTS_ONLY = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen": QWEN}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>", "<pad>"]

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}}]
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello <b>world</b> & 'friends'"}],
    "many": [
        {"role": "system", "content": "  You are terse.\n"},
        {"role": "user", "content": "Größe? 漢字 🙂 <|im_end|> injected"},
        {"role": "assistant", "content": "Yes.  "},
        {"role": "user", "content": ""},
    ],
    "names": [{"role": "user", "name": "ann", "content": "tabs\tand\n\nnewlines  "}],
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = [Path(__file__).read_text(encoding="utf-8"), CHATML, LLAMA3, QWEN]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(corpus, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    backend.enable_truncation(8)  # such settings come in files and must not matter
    backend.enable_padding()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def encoder_for(tokenizer: PreTrainedTokenizerFast, template: str) -> PromptEncoder:
    tokenizer.chat_template = template or None
    format = PromptFormat.from_tokenizer(tokenizer, model_digest="m", model_names=["tiny"], block_tokens=16, max_model_len=128)
    assert msgspec.json.decode(msgspec.json.encode(format), type=PromptFormat) == format  # it travels as JSON
    return PromptEncoder(format)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_chat_tokens_equal_transformers(tokenizer: PreTrainedTokenizerFast, template: str, chat: str, generation: bool, tools: Any) -> None:
    encoder = encoder_for(tokenizer, TEMPLATES[template])
    expected = tokenizer.apply_chat_template(CHATS[chat], tools=tools, add_generation_prompt=generation)["input_ids"]
    assert list(encoder.encode_chat(CHATS[chat], tools, generation)) == expected


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("final", ["Once upon ", "Once upon", [{"type": "text", "text": "a time "}]])
def test_continuing_the_final_message_equals_transformers(tokenizer: PreTrainedTokenizerFast, template: str, final: Any) -> None:
    encoder = encoder_for(tokenizer, TEMPLATES[template])
    plain = final if template == "qwen" or isinstance(final, str) else "a time "  # what a template that reads strings gets
    chat = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": plain}]
    expected = tokenizer.apply_chat_template(chat, continue_final_message=True)["input_ids"]
    chat[-1]["content"] = final
    assert list(encoder.encode_chat(chat, add_generation_prompt=False, continue_final_message=True)) == expected


def test_tool_calls_reasoning_and_template_variables_equal_transformers(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = encoder_for(tokenizer, QWEN)
    arguments = {"city": "Zürich", "n": 1}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "reasoning": "must look", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}]},
    ]
    for variables in ({}, {"enable_thinking": False}):
        expected = tokenizer.apply_chat_template(chat, tools=TOOLS, add_generation_prompt=True, **variables)["input_ids"]
        assert list(encoder.encode_chat(chat, TOOLS, template_kwargs=variables)) == expected
    call["function"] = {"name": "weather", "arguments": json.dumps(arguments)}  # as OpenAI's clients send it
    assert list(encoder.encode_chat(chat, TOOLS, template_kwargs={"enable_thinking": False})) == expected


def test_tool_arguments_are_passed_as_the_template_reads_them(tokenizer: PreTrainedTokenizerFast) -> None:
    """Most templates write an object as JSON; DeepSeek's inserts the text between other texts."""
    added = "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '<' + FORM + '>' }}{% endfor %}{% endfor %}"
    as_object = encoder_for(tokenizer, added.replace("FORM", "c.function.arguments | tojson"))
    as_text = encoder_for(tokenizer, added.replace("FORM", "c.function.arguments"))
    for arguments in ({"city": "Zürich"}, '{"city": "Zürich"}'):
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        assert as_object.render_chat(chat) == as_text.render_chat(chat) == 'a<{"city": "Zürich"}>'


@pytest.mark.parametrize("text", ["", "Hello", "  spaces  ", "<|im_start|>user", "漢字🙂\u200b" * 20])
def test_text_tokens_equal_transformers(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    encoder = encoder_for(tokenizer, "")
    assert list(encoder.encode_text(text)) == tokenizer(text)["input_ids"]
    assert list(encoder.encode_text(text, add_special_tokens=False)) == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("said", [{}, {"content": None}])
def test_missing_content_becomes_an_empty_string_where_the_template_needs_one(tokenizer: PreTrainedTokenizerFast, said: Any) -> None:
    """ChatML adds `message['content']` to a string: a model without tools in its template must still read a conversation that had some."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked, answered = {"role": "user", "content": "a"}, {"role": "tool", "tool_call_id": "call_1", "content": "r"}
    chat = [asked, {"role": "assistant", "tool_calls": [call], **said}, answered]
    encoder = encoder_for(tokenizer, CHATML)
    as_text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'  # ChatML would leave the call out
    assert list(encoder.encode_chat(chat)) == list(encoder.encode_chat([asked, {"role": "assistant", "content": as_text}, answered]))


def test_content_parts_are_passed_as_the_template_reads_them(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    chatml, qwen, only = (encoder_for(tokenizer, template) for template in (CHATML, QWEN, PARTS_ONLY))
    assert "user\na\nb<" in chatml.render_chat(parts)
    assert "user\nab<" in qwen.render_chat(parts)
    assert "user\nab<" in only.render_chat(parts)
    assert "user\nab<" in only.render_chat([{"role": "user", "content": "ab"}])


def test_a_developer_message_is_not_dropped(tokenizer: PreTrainedTokenizerFast) -> None:
    """Most templates know only the role's older name and silently skip an unknown role."""
    told = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    silent = "{% for m in messages %}{% if m.role in ['system', 'user'] %}{{ '<' + m.role + '>' + m.content }}{% endif %}{% endfor %}"
    assert encoder_for(tokenizer, silent).render_chat(told) == "<system>Be brief.<user>hi"
    assert "<|start_header_id|>system" in encoder_for(tokenizer, LLAMA3).render_chat(told)
    assert "<|im_start|>developer" in encoder_for(tokenizer, CHATML).render_chat(told)


def test_a_custom_role_is_accepted_where_the_template_renders_it(tokenizer: PreTrainedTokenizerFast) -> None:
    """CHATML prints any role; LLAMA3 here refuses it, and a silent template would leave the message out."""
    asked = [{"role": "critic", "content": "Too long."}, {"role": "user", "content": "hi"}]
    assert "<|im_start|>critic\nToo long." in encoder_for(tokenizer, CHATML).render_chat(asked)
    for role in ("critic<|im_end|>", "a b", "", "x" * 65):
        with pytest.raises(PromptError, match=r"messages\[0\].role"):
            encoder_for(tokenizer, CHATML).render_chat([{"role": role, "content": "hi"}])


def test_a_result_that_the_template_refuses_is_text_of_the_user(tokenizer: PreTrainedTokenizerFast) -> None:
    written = encoder_for(tokenizer, LLAMA3).render_chat([{"role": "tool", "content": "High"}])
    assert "<|start_header_id|>user" in written and "<tool_response>\nHigh\n</tool_response>" in written


def test_reasoning_alone_has_an_empty_content(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "reasoning_content": "r"}, {"role": "user", "content": "b"}]
    empty = [chat[0], {"role": "assistant", "content": ""}, chat[2]]
    assert encoder_for(tokenizer, CHATML).render_chat(chat) == encoder_for(tokenizer, CHATML).render_chat(empty)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("messages", {"messages": "hi"}),
        ("messages", {"messages": []}),
        ("messages[0]", {"messages": ["hi"]}),
        ("messages[0].role", {"messages": [{"content": "hi"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("messages[0].tool_calls", {"messages": [{"role": "assistant", "tool_calls": {}}]}),
        ("messages[0].role", {"messages": [{"role": "wizard", "content": "hi"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
        ("messages", {"messages": [{"role": "user", "content": "lone \ud800"}]}),
        ("tools", {"messages": CHATS["one"], "tools": "x"}),
        ("tools[0]", {"messages": CHATS["one"], "tools": ["x"]}),
        ("continue_final_message", {"messages": CHATS["one"], "continue_final_message": True}),
        ("chat_template_kwargs", {"messages": CHATS["one"], "template_kwargs": [1]}),
    ],
)
def test_refusals_name_the_field(tokenizer: PreTrainedTokenizerFast, field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(PromptError) as refusal:
        encoder_for(tokenizer, LLAMA3).encode_chat(**arguments)
    assert refusal.value.field == field and str(refusal.value).startswith(f"{field}: ")


def test_errors_of_a_models_own_files_are_named(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(PromptError, match="no chat template"):
        encoder_for(tokenizer, "").encode_chat(CHATS["one"])
    with pytest.raises(PromptError, match=r"chat_template.*does not compile"):
        encoder_for(tokenizer, "{% for %}")
    with pytest.raises(PromptError, match="tokenizer_json"):
        PromptEncoder(msgspec.structs.replace(encoder_for(tokenizer, "").format, tokenizer_json="{}"))
    with pytest.raises(PromptError, match="refused"):
        encoder_for(tokenizer, "{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}").encode_chat(CHATS["one"])


@pytest.mark.parametrize("text", ["Hello  world\n", "Größe 漢字 🙂 ok", "a" * 40, "<|im_start|>x<|im_end|>"])
@pytest.mark.parametrize("step", [1, 3])
def test_streamed_text_is_complete_and_never_splits_a_character(tokenizer: PreTrainedTokenizerFast, text: str, step: int) -> None:
    encoder = encoder_for(tokenizer, "")
    prompt, tokens = encoder.encode_text("Prompt: "), encoder.encode_text(text, add_special_tokens=False)
    stream = encoder.stream(prompt)
    pieces = [stream.push(tokens[at : at + step]) for at in range(0, len(tokens), step)]
    assert "".join(pieces) + stream.finish() == encoder.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)
    cut = encoder.stream(prompt)
    half = encoder.encode_text("🙂", add_special_tokens=False)[:-1]
    assert cut.push(half) == "" and "\ufffd" in cut.finish() and cut.finish() == ""


def test_a_long_stream_keeps_only_a_window_of_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = encoder_for(tokenizer, "")
    tokens = encoder.encode_text("several words, again and again; " * 200, add_special_tokens=False)
    stream = encoder.stream()
    assert "".join(stream.push([token]) for token in tokens) + stream.finish() == encoder.decode(tokens)
    assert len(stream._tokens) < 600


def test_a_long_prompt_does_not_block_other_threads(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = encoder_for(tokenizer, CHATML)
    text = Path(__file__).read_text(encoding="utf-8") * 150
    tokens = encoder.encode_text(text)
    for work in (lambda: encoder.encode_text(text), lambda: encoder.decode(tokens)):
        thread = threading.Thread(target=work)
        thread.start()
        turns = 0
        while thread.is_alive():
            time.sleep(0.001)
            turns += 1
        assert turns > 20  # one or two if the GIL were held
    assert encoder.decode(tokens) == encoder._tokenizer.decode(tokens.tolist())
