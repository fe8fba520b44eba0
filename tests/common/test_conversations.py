"""Whatever a model answered and a client sends back renders, without loss and without Python's own writing, as transformers renders it."""

import json
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.common.chat_templates import OWN, REAL, STRICT
from tokenizers import Tokenizer, models
from transformers.utils.chat_template_utils import render_jinja_template

from fairlead_common.prompts.call_history import complete_calls
from fairlead_common.prompts.encoder import PromptEncoder, PromptError, PromptFormat
from fairlead_common.prompts.messages import ChatRenderer
from fairlead_worker.parsing.tool_template import build_tool_template

Message = dict[str, Any]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TOOLS = [{"type": "function", "function": {"name": "forecast", "description": "d", "parameters": {"type": "object", "properties": {}}}}]
ABSENT = object()
ASKED, ANSWERED, NEXT = ({"role": role, "content": text} for role, text in (("user", "Ask"), ("assistant", "Said"), ("user", "Then")))
PLAIN = [ASKED, ANSWERED, NEXT]
AS_PARTS = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in PLAIN]
TOLD, LATER, AGAIN = (
    {"role": "system", "content": "Rules"},
    {"role": "system", "content": "Agents"},
    {"role": "user", "content": "Again"},
)
ORDERS: list[list[Message]] = [
    [TOLD, ASKED],
    [TOLD, ASKED, LATER],
    [TOLD, ASKED, NEXT],
    [TOLD, ASKED, NEXT, LATER, AGAIN],
    [TOLD, LATER, ASKED, ANSWERED, NEXT],
    [TOLD, ASKED, ANSWERED, LATER, NEXT],
    [ASKED, ANSWERED, {"role": "assistant", "content": "More"}, NEXT],
]
"""Claude Code sends the second, Codex the third."""


DEVELOPED, LATE = ({"role": "developer", "content": text} for text in ("Devel", "Late"))
MORE = {"role": "assistant", "content": "More"}


def calling(*calls: Message, **said: Any) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **said}


def call(arguments: Any = '{"h": "Harb"}', id: str = "abcdefg12", name: str = "tide") -> Message:
    return {"id": id, "type": "function", "function": {"name": name} | ({} if arguments is ABSENT else {"arguments": arguments})}


TIDE, WIND = calling(call()), calling(call(id="abcdefg13", name="wind"))
HIGH, CALM = ({"role": "tool", "tool_call_id": id, "content": text} for id, text in (("abcdefg12", "High"), ("abcdefg13", "Calm")))
HISTORIES: dict[str, list[Message]] = {
    "text, call": [ASKED, ANSWERED, TIDE, HIGH],
    "text, call, answer": [ASKED, ANSWERED, TIDE, HIGH, MORE, NEXT],
    "text, text, call": [ASKED, ANSWERED, MORE, TIDE, HIGH],
    "call, text": [ASKED, TIDE, ANSWERED, HIGH, MORE, NEXT],
    "call, call": [ASKED, TIDE, WIND, HIGH, CALM],
    "call, call, answer": [ASKED, TIDE, WIND, CALM, HIGH, MORE, NEXT],
    "thoughts, calls": [ASKED, {**TIDE, "reasoning_content": "Hm"}, {**WIND, "reasoning_content": "Ho"}, HIGH, CALM],
    "developer later": [TOLD, DEVELOPED, ASKED],
    "developer again": [DEVELOPED, ASKED, ANSWERED, LATE, NEXT],
    "developer last": [ASKED, DEVELOPED],
    "developer, system": [DEVELOPED, TOLD, ASKED],
    "answer first": [ANSWERED, ASKED],
    "answer first in parts": [{**ANSWERED, "content": [{"type": "text", "text": "Said"}]}, *AS_PARTS[:1]],
    "result first": [HIGH, ANSWERED, ASKED],
    "result first in parts": [{**HIGH, "content": [{"type": "text", "text": "High"}]}, *AS_PARTS[:1]],
    "result after system": [TOLD, HIGH, ANSWERED, ASKED],
    "call first": [TIDE, HIGH, ANSWERED, ASKED],
    "no question": [TIDE, HIGH],
    "only a result": [HIGH],
    "only an answer": [TOLD, ANSWERED],
    "system": [TOLD],
    "two systems": [TOLD, LATER],
    "developer": [DEVELOPED],
    "no result": [ASKED, TIDE, NEXT],
    "one of two results": [ASKED, calling(call(), call(id="abcdefg13", name="wind")), HIGH, NEXT],
    "answer for result": [ASKED, TIDE, ANSWERED, NEXT],
    "late result": [ASKED, TIDE, NEXT, HIGH, MORE, AGAIN],
    "result without call": [ASKED, ANSWERED, HIGH, NEXT],
    "system before result": [TOLD, ASKED, TIDE, LATER, HIGH, MORE, NEXT],
}
TEXTS = ("Rules", "Agents", "Devel", "Late", "Ask", "Said", "More", "Then", "Again", "High", "Calm", "tide", "wind", "Harb")

EMPTY_ARGUMENTS = (ABSENT, None, "", "  ", "null", '""', "{}", {})
BROKEN_ARGUMENTS = (
    '{"h": "Harb',
    '{"h": ["Harb',
    '{"h": "Harb"} trailing',
    "Harb",
    '["Harb"]',
    '"Harb"',
    '{"h": "Harb", "b": tr',
    '"{\\"h\\": \\"Harb',
)
SIGNS = ("'type'", "'text'", "[{'", "'h':", "['", "None", "Undefined")
"""Signs of Python's writing of the values in these conversations."""


def talk(arguments: Any = '{"h": "Harb"}', result: Any = "High", id: str = "abcdefg12", **said: Any) -> list[Message]:
    """Return a conversation with a call. `said`: fields of its message; ABSENT leaves one out."""
    message = {"role": "assistant", "content": None, "tool_calls": [call(arguments, id)], **said}
    message = {key: value for key, value in message.items() if value is not ABSENT}
    return [ASKED, message, {"role": "tool", "tool_call_id": id, "content": result}, ANSWERED, NEXT]


def parts(text: str) -> list[Message]:
    return [{"type": "text", "text": text}]


def in_transformers(source: str, messages: list[Message], tools: Any = None) -> str | None:
    """Return transformers' rendering, or None if the template refuses the messages."""
    try:
        return render_jinja_template([messages], tools=tools, chat_template=source, add_generation_prompt=True, **SPECIAL)[0][0]
    except Exception:  # a template raises anything
        return None


def encoder_for(source: str) -> PromptEncoder:
    """Return the encoder that router and worker have for a model with this template."""
    return PromptEncoder(
        PromptFormat(
            tokenizer_json=Tokenizer(models.BPE()).to_str(),
            tokenizer_digest="t",
            model_digest="m",
            model_names=["m"],
            block_tokens=16,
            max_model_len=64,
            chat_template=source,
            tool_template=build_tool_template(source),
            special_tokens=SPECIAL,
        )
    )


def render(encoder: PromptEncoder, messages: list[Message], tools: Any = None) -> str:
    """Tests share renderings of the same messages."""
    return _render(encoder, json.dumps(messages), bool(tools))


@lru_cache(maxsize=1024)
def _render(encoder: PromptEncoder, messages: str, has_tools: bool) -> str:
    return encoder.render_chat(json.loads(messages), TOOLS if has_tools else None, True)


def check(encoder: PromptEncoder, messages: list[Message], *texts: str) -> None:
    """Require that the messages render with their texts, with tools and without."""
    for tools in (None, TOOLS):
        if not serves(encoder, tools):
            continue
        output = render(encoder, messages, tools)
        assert not [text for text in texts if text not in output], (messages, output)
        assert not find_python(output, encoder.format.chat_template), (messages, output)


def serves(encoder: PromptEncoder, tools: Any) -> bool:
    """Return False for a template that needs variables of its own, as of another program. Transformers cannot render it either."""
    try:
        render(encoder, PLAIN, tools)
    except PromptError:
        assert not any(in_transformers(encoder.format.chat_template, each, tools) for each in (PLAIN, AS_PARTS))
        return False
    return True


def find_python(output: str, source: str) -> list[str]:
    """Return the signs of Python's writing in a prompt. A list in a call that is written as Python is right."""
    return [sign for sign in SIGNS if sign in output and sign not in source and not (sign == "['" and "h=['" in output)]


def encoders() -> Iterator[Any]:
    for name, source in (OWN | {"strict": STRICT}).items():
        yield pytest.param(source, id=name)
    for path in REAL:
        yield pytest.param(path, id=path.stem[-60:])


@pytest.fixture(params=encoders(), scope="module")
def encoder(request: pytest.FixtureRequest) -> PromptEncoder:
    source = request.param.read_text(encoding="utf-8") if isinstance(request.param, Path) else request.param
    try:
        return encoder_for(source)
    except PromptError as error:
        assert in_transformers(source, PLAIN) is None
        pytest.skip(str(error))


def test_an_empty_optional_field_is_no_field(encoder: PromptEncoder) -> None:
    if not serves(encoder, None):
        return
    expected = {in_transformers(encoder.format.chat_template, each) for each in (PLAIN, AS_PARTS)}
    for key in ("tool_calls", "annotations", "function_call", "audio", "refusal", "name", "reasoning_details"):
        for value in ([], None):
            output = render(encoder, [ASKED, {**ANSWERED, key: value}, {**NEXT, key: value}])
            assert output == render(encoder, PLAIN) and output in expected, key


def test_a_result_in_parts_is_its_text(encoder: PromptEncoder) -> None:
    for result in (parts("High"), ["High"], [{"type": "output_text", "text": "High"}], [*parts("It is"), *parts("High")]):
        check(encoder, talk(result=result), "tide", "Harb", "High", "Said", "Then")


def test_parts_of_any_role_are_text(encoder: PromptEncoder) -> None:
    if not serves(encoder, None):
        return
    assert render(encoder, AS_PARTS) == render(encoder, PLAIN)
    two = render(encoder, [{**each, "content": [*parts(each["content"]), *parts("More")]} for each in PLAIN])
    assert all(text in two for text in ("Ask", "Said", "Then", "More")) and not find_python(two, encoder.format.chat_template)
    told = [{"role": "system", "content": "Be brief"}, *PLAIN]
    try:
        expected = render(encoder, told)
    except PromptError:
        return  # it has no system messages
    assert render(encoder, [{**told[0], "content": parts("Be brief")}, *PLAIN]) == expected


def test_every_kind_of_text_is_read(encoder: PromptEncoder) -> None:
    if not serves(encoder, None):
        return
    kinds = (("input_text", "text"), ("output_text", "text"), ("refusal", "refusal"))
    for content in ([{"type": kind, field: "Said"}] for kind, field in kinds):
        assert render(encoder, [ASKED, {**ANSWERED, "content": content}, NEXT]) == render(encoder, PLAIN)
    assert render(encoder, [{**each, "content": [each["content"]]} for each in PLAIN]) == render(encoder, PLAIN)
    assert render(encoder, [ASKED, {"role": "assistant", "content": None, "refusal": "Said"}, NEXT]) == render(encoder, PLAIN)


def test_a_call_without_text_is_kept(encoder: PromptEncoder) -> None:
    for content in (ABSENT, None, "", [], parts("")):
        check(encoder, talk(content=content), "Ask", "tide", "Harb", "High", "Said", "Then")


def test_a_call_is_rendered_as_transformers_renders_it(encoder: PromptEncoder) -> None:
    """In one of the forms that transformers' users may give it, where one of them keeps the call and its result."""
    forms = [
        [{**each, "content": parts(each["content"])} if style and isinstance(each.get("content"), str) else each for each in form]
        for style in (False, True)
        for arguments in ({"h": "Harb"}, '{"h": "Harb"}')
        for content in (ABSENT, None, "")
        for form in [talk(arguments, content=content)]
    ]
    for tools in (None, TOOLS):
        outputs = [in_transformers(encoder.format.chat_template, form, tools) for form in forms]
        expected = [text for text in outputs if text and "tide" in text and "High" in text and not find_python(text, "")]
        native = not tools or not encoder.format.tool_template
        assert not expected or not native or render(encoder, talk(), tools) in expected


def test_no_arguments_are_an_empty_object(encoder: PromptEncoder) -> None:
    for arguments in EMPTY_ARGUMENTS:
        check(encoder, talk(arguments), "Ask", "tide", "High", "Said", "Then")
        if serves(encoder, None):
            assert render(encoder, talk(arguments)) == render(encoder, talk("{}")), arguments


def test_what_a_model_wrote_as_arguments_renders(encoder: PromptEncoder) -> None:
    for arguments in BROKEN_ARGUMENTS:
        check(encoder, talk(arguments), "Ask", "tide", "Harb", "High", "Said", "Then")


def test_text_after_the_arguments_is_kept(encoder: PromptEncoder) -> None:
    for arguments in ('{"h": "Harb"}{"h": "Quay"}', '{"h": "Harb"} Quay', '{"h": "Harb"}\n</tool_call>Quay'):
        check(encoder, talk(arguments), "tide", "Harb", "Quay", "High", "Said", "Then")


def test_half_of_a_surrogate_pair_is_replaced(encoder: PromptEncoder) -> None:
    for arguments in (
        '{"h": "Harb\\ud83d"}',
        '{"h": ["\\ude00 Harb"]}',
        '{"\\ud800": "Harb"}',
        '{"h": "Harb\\ud83d',
        '"{\\"h\\": \\"Harb\\\\ud83d',
    ):
        if serves(encoder, None):
            assert "Harb" in render(encoder, talk(arguments)).encode().decode()
    assert "Harb 😀é" in render(own_encoder("joined text"), talk({"h": "Harb 😀é"}))
    assert "Harb 😀é" in render(own_encoder("items"), talk('{"h": "Harb \\ud83d\\ude00\\u00e9"}'))


def test_calls_and_results_without_id_or_type_are_completed(encoder: PromptEncoder) -> None:
    def check_without(*fields: str, result: Message) -> None:
        messages = talk()
        messages[1]["tool_calls"] = [{key: value for key, value in call().items() if key not in fields}]
        messages[2] = {"role": "tool", "content": "High", **result}
        check(encoder, messages, "tide", "Harb", "High", "Said", "Then")

    check_without("type", result={"tool_call_id": "abcdefg12"})
    check_without("id", "type", result={})
    check_without(result={})
    check_without(result={"tool_call_id": "another01"})
    flat = [{"id": "abcdefg12", "name": "tide", "arguments": '{"h": "Harb"}'}]
    check(encoder, talk(tool_calls=flat), "tide", "Harb", "High", "Said", "Then")
    if serves(encoder, None):
        assert render(encoder, talk(tool_calls=flat)) == render(encoder, talk())


def test_each_result_without_id_gets_that_of_its_call() -> None:
    named = [call(id="a"), {**call(), "id": None}, call(id="b")]
    results = [{"role": "tool", "content": "x", **({"tool_call_id": id} if id else {})} for id in ("b", None, None, "z")]
    _, said, *told = complete_calls([ASKED, {"role": "assistant", "tool_calls": named}, *results])
    assert [each["id"] for each in said["tool_calls"]] == ["a", "call00001", "b"]
    assert [each["tool_call_id"] for each in told] == ["b", "a", "call00001", "z"]


def test_calls_of_openais_first_api_are_calls(encoder: PromptEncoder) -> None:
    if not serves(encoder, None):
        return
    message = {"role": "assistant", "content": None, "function_call": call()["function"]}
    result = {"role": "function", "name": "tide", "content": "High"}
    messages = [ASKED, message, result, ANSWERED, NEXT]
    check(encoder, messages, "Ask", "tide", "Harb", "High", "Said", "Then")
    with pytest.raises(PromptError) as refusal:
        render(encoder, [ASKED, {**message, "function_call": "tide"}, NEXT])
    assert refusal.value.field == "messages[1].function_call"


def test_a_tool_may_return_nothing(encoder: PromptEncoder) -> None:
    for result in (None, "", [], parts("")):
        check(encoder, talk(result=result), "tide", "Harb", "Said", "Then")


def test_every_answer_with_calls_can_be_sent_back(encoder: PromptEncoder) -> None:
    for content in (None, "Look", parts("Look")):
        for thought in ({}, {"reasoning_content": "Hm"}, {"reasoning": "Hm"}):
            messages = talk(content=content, **thought)
            check(encoder, messages, "tide", "Harb", "High", "Said", "Then")
            messages[1]["tool_calls"] = [call(), call('{"h": "Quay"}', "abcdefg13", "wind")]
            messages.insert(3, {"role": "tool", "tool_call_id": "abcdefg13", "content": "Calm"})
            check(encoder, messages, "tide", "Harb", "High", "wind", "Quay", "Calm", "Said", "Then")


def test_the_result_of_each_call_follows_it_where_a_message_has_one_call() -> None:
    """Gpt-oss names the last call at each result, and Llama 3.1 refuses two calls in a message."""
    messages = talk(tool_calls=[call(), call('{"h": "Quay"}', "abcdefg13", "wind")], content="Look")
    messages[2:3] = [{"role": "tool", "tool_call_id": id, "content": text} for id, text in (("abcdefg13", "Calm"), ("abcdefg12", "High"))]
    output = render(own_encoder("one call"), messages)
    assert [word for word in output.replace("<", " ").replace(">", " ").split() if word in ("tide", "High", "wind", "Calm", "Said")] == [
        "tide",
        "High",
        "wind",
        "Calm",
        "Said",
    ]
    kept = render(own_encoder("object"), messages)
    assert kept.index("wind") < kept.index("Calm") < kept.index("High")


def test_an_answer_without_text_can_be_sent_back(encoder: PromptEncoder) -> None:
    for said in ({"content": ""}, {"content": None}, {}, {"content": []}, {"content": None, "reasoning_content": "Hm"}):
        check(encoder, [ASKED, {"role": "assistant", **said}, NEXT], "Ask", "Then")


def test_another_servers_ids_are_taken(encoder: PromptEncoder) -> None:
    check(encoder, talk(id="call_0123456789abcdef"), "tide", "Harb", "High", "Said", "Then")


def test_no_order_of_turns_is_refused_or_lost(encoder: PromptEncoder) -> None:
    if not serves(encoder, None):
        return
    for messages in ORDERS:
        output = render(encoder, messages)
        assert not [each["content"] for each in messages if each["content"] not in output], (messages, output)


def test_a_template_that_renders_all_orders_gets_them_unchanged(encoder: PromptEncoder) -> None:
    if not serves(encoder, None):
        return
    expected = [in_transformers(encoder.format.chat_template, messages) or "" for messages in ORDERS]
    if all(each["content"] in output for output, messages in zip(expected, ORDERS, strict=True) for each in messages):
        assert [render(encoder, messages) for messages in ORDERS] == expected


@pytest.mark.parametrize("name", HISTORIES)
def test_no_history_is_refused_or_lost(encoder: PromptEncoder, name: str) -> None:
    messages = HISTORIES[name]
    texts = [text for text in TEXTS if text in json.dumps(messages)]
    for tools in (None, TOOLS):
        if serves(encoder, tools):
            output = render(encoder, messages, tools)
            assert not [text for text in texts if text not in output], output
            assert not find_python(output, encoder.format.chat_template), output


def test_a_template_gets_each_history_unchanged_that_it_renders_whole(encoder: PromptEncoder) -> None:
    """One that shows all conversations of a kind, in a form that transformers' users may give it."""
    for names in (("text, call", "text, call, answer"), ("call, call", "call, call, answer"), ("answer first",), ("system",)):
        expected = [_whole_renderings(encoder, HISTORIES[name]) for name in names]
        if all(expected):
            assert all(render(encoder, HISTORIES[name]) in each for name, each in zip(names, expected, strict=True)), names


def _whole_renderings(encoder: PromptEncoder, messages: list[Message]) -> list[str]:
    """Return transformers' renderings that have all texts, of each form of content and arguments."""
    texts = [text for text in TEXTS if text in json.dumps(messages)]
    forms = [
        [{**each, **({"content": content} if "tool_calls" in each else {})} for each in json.loads(text)]
        for text in (json.dumps(messages), json.dumps(messages).replace('"{\\"h\\": \\"Harb\\"}"', '{"h": "Harb"}'))
        for content in (None, "")
    ]
    forms += [[{key: value for key, value in each.items() if value is not None} for each in form] for form in forms]
    forms += [[{**each, "content": parts(each["content"])} if each.get("content") else each for each in form] for form in forms]
    outputs = [in_transformers(encoder.format.chat_template, form) or "" for form in forms]
    return [each for each in outputs if all(text in each for text in texts) and not find_python(each, encoder.format.chat_template)]


def test_reasoning_in_parts_is_the_templates_reasoning(encoder: PromptEncoder) -> None:
    if not serves(encoder, None):
        return
    said = [{"type": "thinking", "thinking": "Hm"}, *parts("Said")]
    forms: list[list[Message]] = [
        [ASKED, {**ANSWERED, "content": said}],
        [ASKED, {**ANSWERED, "content": "Said", "reasoning_content": "Hm"}],
    ]
    outputs = [in_transformers(encoder.format.chat_template, form) or "" for form in forms]
    is_rendered = any("Hm" in each and not re.search(r"['\"]type['\"]", each) for each in outputs)
    for kind in ({"type": "reasoning", "text": "Hm"}, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]}, said[0]):
        output = render(encoder, [ASKED, {**ANSWERED, "content": [kind, {"type": "redacted_thinking", "data": "x"}, *parts("Said")]}])
        assert "Said" in output and "HmSaid" not in output and "Hm\nSaid" not in output, output
        assert output == render(encoder, forms[1])
    assert not is_rendered or "Hm" in output


def test_a_question_beside_a_result_is_kept(encoder: PromptEncoder) -> None:
    if not serves(encoder, TOOLS):
        return
    until_result = talk(content=ABSENT)[:3]
    try:
        render(encoder, until_result, TOOLS)
    except PromptError:
        return  # the template has no results
    for others in ([NEXT], [LATER], [NEXT, LATER]):
        output = render(encoder, [*until_result, *others], TOOLS)
        assert not [each["content"] for each in others if each["content"] not in output], output


def continued(encoder: PromptEncoder, messages: list[Message], tools: Any = None) -> str:
    return encoder.render_chat(messages, tools, False, continue_final_message=True)


def test_continue_an_answer_after_an_open_call(encoder: PromptEncoder) -> None:
    """The call stays before it, though some templates read no answer beside a call."""
    for tools in (None, TOOLS):
        if serves(encoder, tools):
            for calls in ([TIDE], [TIDE, WIND], [MORE, TIDE]):
                output = continued(encoder, [ASKED, *calls, ANSWERED], tools)
                assert output.endswith("Said"), output
                assert all(text in output for text in ("Ask", "tide", *(["wind"] if WIND in calls else []))), output


def test_continue_an_empty_answer_after_thinking(encoder: PromptEncoder) -> None:
    empty = {**ANSWERED, "content": ""}
    for tools in (None, TOOLS):
        try:
            continued(encoder, [ASKED, empty], tools)
        except PromptError:
            continue  # the template leaves out an empty answer
        for name in ("reasoning_content", "thinking", "reasoning"):
            assert "Ask" in continued(encoder, [ASKED, {**empty, name: "Hm"}], tools)
    if encoder.format.chat_template == OWN["thinking parts"]:
        assert continued(encoder, [ASKED, {**empty, "reasoning": "Hm"}]).endswith("<assistant><think>Hm</think>")


_CONTENT = st.sampled_from([ABSENT, None, "", [], "Look", parts("Look"), ["Look"]])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab{\"'", max_size=4),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.just("h"), each),
    max_leaves=5,
)


@cache
def own_encoder(kind: str) -> PromptEncoder:
    return encoder_for(OWN[kind])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(OWN)), _CONTENT, _VALUES, st.integers(0, 12), st.booleans())
def test_any_answer_cut_anywhere_can_be_sent_back(kind: str, content: Any, value: Any, cut: int, thinks: bool) -> None:
    written = json.dumps({"h": value})
    said = {"content": content} | ({"reasoning": "Hm"} if thinks else {})
    messages = talk(written[: max(0, len(written) - cut)], parts("High"), **said)
    for tools in (None, TOOLS):
        output = render(own_encoder(kind), messages, tools)
        assert all(text in output for text in ("Ask", "tide", "High", "Said", "Then"))


def test_only_a_picture_in_the_last_question_is_refused() -> None:
    shown = [*parts("Look"), {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}]
    old = [{"role": "user", "content": shown}, TIDE, {**HIGH, "content": shown}, NEXT]
    for messages in (old, [*old, TIDE, {**HIGH, "content": shown}]):
        output = render(own_encoder("object"), messages)
        assert "[image_url left out: this model reads text only]" in output and "QUJD" not in output
    with pytest.raises(PromptError, match="reads text only") as refusal:
        render(own_encoder("object"), [*old, {"role": "user", "content": shown}])
    assert refusal.value.field == "messages[4].content[1].type"
    report = {"type": "search_result", "title": "High"}
    assert "High" in render(own_encoder("object"), [ASKED, TIDE, {**HIGH, "content": [report]}])


@pytest.mark.parametrize(
    ("field", "content"),
    [
        ("content[0].type", [{"type": "image_url", "image_url": {}}]),
        ("content[0].text", [{"type": "input_text", "text": None}]),
        ("content[0]", [5]),
        ("content", 5),
    ],
)
def test_other_content_is_refused_by_name(field: str, content: Any) -> None:
    for role in ("user", "assistant"):
        with pytest.raises(PromptError) as refusal:
            render(own_encoder("object"), [{"role": role, "content": content}])
        assert refusal.value.field == f"messages[0].{field}"


@pytest.mark.parametrize("name", ["content", "reasoning_content"])
def test_thinking_has_one_level_of_parts(name: str) -> None:
    thought: Any = [{"type": "thinking", "thinking": "Hm"}]
    said = {**ANSWERED, name: [{"type": "thinking", "thinking": thought}, *parts("Said")]}
    assert "Said" in render(own_encoder("thinking parts"), [ASKED, said])
    for levels in (2, 250):
        for _ in range(levels):
            thought = [{"type": "thinking", "thinking": thought}]
        with pytest.raises(PromptError, match="must be a string inside other reasoning") as refusal:
            render(own_encoder("thinking parts"), [ASKED, {**ANSWERED, name: thought}])
        assert refusal.value.field == f"messages[1].{name}[0].thinking[0].thinking"


@pytest.mark.parametrize(
    ("field", "given_call"),
    [("", 5), (".function", {"id": "a"}), (".function", {"function": "f"}), (".function.name", {"function": {"name": 5}})],
)
def test_a_call_that_is_none_is_refused_by_name(field: str, given_call: Any) -> None:
    with pytest.raises(PromptError) as refusal:
        render(own_encoder("object"), talk(tool_calls=[given_call]))
    assert refusal.value.field == f"messages[1].tool_calls[0]{field}"


@pytest.mark.parametrize("id", [5, [1], {"a": 1}, None, ""])
@pytest.mark.parametrize("kind", ["one call", "object"])
def test_ids_of_any_type_render(kind: str, id: Any) -> None:
    messages = talk(tool_calls=[call(id=id), call(id=id, name="wind")])
    messages[2]["tool_call_id"] = id
    assert all(text in render(own_encoder(kind), messages) for text in ("tide", "wind", "High", "Then"))


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% if tools %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ (range(99999) | list * 99999) | length }}",
    ],
)
def test_a_template_that_does_not_end_is_refused_at_the_start(source: str) -> None:
    with pytest.raises(PromptError, match=r"does not end.*--chat-template") as refusal:
        encoder_for(source)
    assert refusal.value.field == "chat_template"


def test_a_conversation_on_which_a_template_does_not_end_is_refused() -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    encoder = encoder_for(
        f"{{% for m in messages %}}{{{{ m.content }}}}{{% if 'forever' in (m.content or '') %}}{loop}{{% endif %}}{{% endfor %}}"
    )
    with pytest.raises(PromptError, match="does not end"):
        render(encoder, [{"role": "user", "content": "forever"}])
    assert render(encoder, [{"role": "user", "content": "once"}] * 2000) == "once" * 2000


def test_a_template_of_requests_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is probed like the model's own, which takes longer than many renderings."""
    compiled = []
    compile_template = ChatRenderer.__init__

    def count(self: ChatRenderer, source: str, special_tokens: dict[str, str]) -> None:
        compiled.append(source)
        compile_template(self, source, special_tokens)

    encoder = own_encoder("object")
    monkeypatch.setattr(ChatRenderer, "__init__", count)
    for _ in range(3):
        assert "Then" in encoder.render_chat(PLAIN, template=OWN["items"])
    assert compiled == [OWN["items"]]
