"""Calls of a conversation, in any form that models and clients write them, render with their arguments, ids and results."""

from typing import Any

import pytest
from tests.common.talks import (
    ABSENT,
    ANSWERED,
    ASKED,
    BROKEN_ARGUMENTS,
    EMPTY_ARGUMENTS,
    LATER,
    NEXT,
    TOOLS,
    Message,
    call,
    check,
    find_python,
    in_transformers,
    own_encoder,
    parts,
    render,
    serves,
    talk,
)

from fairlead_common.prompts.call_history import complete_calls
from fairlead_common.prompts.encoder import PromptEncoder, PromptError


def test_a_result_in_parts_is_its_text(encoder: PromptEncoder) -> None:
    for result in (parts("High"), ["High"], [{"type": "output_text", "text": "High"}], [*parts("It is"), *parts("High")]):
        check(encoder, talk(result=result), "tide", "Harb", "High", "Said", "Then")


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


def test_another_servers_ids_are_taken(encoder: PromptEncoder) -> None:
    check(encoder, talk(id="call_0123456789abcdef"), "tide", "Harb", "High", "Said", "Then")


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
