"""Whatever a model answered and a client sends back renders, without loss and without Python's own writing, as transformers renders it."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.common.chat_templates import OWN
from tests.common.talks import (
    ABSENT,
    ANSWERED,
    AS_PARTS,
    ASKED,
    HIGH,
    HISTORIES,
    MORE,
    NEXT,
    ORDERS,
    PLAIN,
    TEXTS,
    TIDE,
    TOOLS,
    WIND,
    Message,
    check,
    encoder_for,
    find_python,
    in_transformers,
    own_encoder,
    parts,
    render,
    serves,
    talk,
)

from fairlead_common.prompts.encoder import PromptEncoder, PromptError
from fairlead_common.prompts.messages import ChatRenderer


def test_an_empty_optional_field_is_no_field(encoder: PromptEncoder) -> None:
    if not serves(encoder, None):
        return
    expected = {in_transformers(encoder.format.chat_template, each) for each in (PLAIN, AS_PARTS)}
    for key in ("tool_calls", "annotations", "function_call", "audio", "refusal", "name", "reasoning_details"):
        for value in ([], None):
            output = render(encoder, [ASKED, {**ANSWERED, key: value}, {**NEXT, key: value}])
            assert output == render(encoder, PLAIN) and output in expected, key


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
    kinds = (("input_text", "text"), ("output_text", "text"), ("refusal", "refusal"), (None, "text"))
    for content in ([{"type": kind, field: "Said"}] for kind, field in kinds):
        assert render(encoder, [ASKED, {**ANSWERED, "content": content}, NEXT]) == render(encoder, PLAIN)
    assert render(encoder, [{**each, "content": [each["content"]]} for each in PLAIN]) == render(encoder, PLAIN)
    assert render(encoder, [ASKED, {"role": "assistant", "content": None, "refusal": "Said"}, NEXT]) == render(encoder, PLAIN)


def test_an_answer_without_text_can_be_sent_back(encoder: PromptEncoder) -> None:
    for said in ({"content": ""}, {"content": None}, {}, {"content": []}, {"content": None, "reasoning_content": "Hm"}):
        check(encoder, [ASKED, {"role": "assistant", **said}, NEXT], "Ask", "Then")


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


def test_no_history_is_refused_or_lost(encoder: PromptEncoder) -> None:
    for tools in (None, TOOLS):
        if not serves(encoder, tools):
            continue
        for name, messages in HISTORIES.items():
            output = render(encoder, messages, tools)
            assert not [text for text in TEXTS if text in json.dumps(messages) and text not in output], (name, output)
            assert not find_python(output, encoder.format.chat_template), (name, output)


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
