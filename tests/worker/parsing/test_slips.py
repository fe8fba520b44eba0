"""Slips that models are known for: tags left out or doubled, Python's words, no arguments. Each call that an answer reports is right."""

import json
import re
from typing import Any

import pytest
from tests.worker.parsing.samples import SAMPLES, SCHEMAS, Sample

from fairlead_worker.parsing.events import Message, gather
from fairlead_worker.parsing.families import ModelParsers, ParserOptions
from fairlead_worker.parsing.stage import Tools

TAG = re.compile(r"(?!</b>)</?[^<>\s]*(?: [^<>]*)?>|\[/?[A-Z_]+\]|```(?:json)?")
OPTIONS = ParserOptions(Tools({**SCHEMAS, "f": {"type": "object", "properties": {"s": {"type": "string"}, "i": {"type": "integer"}}}}))
CALL = "<tool_call>\n<function=f>\n<parameter=s>\nhi\n</parameter>\n<parameter=i>\n5\n</parameter>\n</function>\n</tool_call>"


def read(parser: ModelParsers, written: str, tail: str = "", options: ParserOptions = OPTIONS) -> tuple[Message, str]:
    """Parse an answer, whole and letter by letter, and require that both are the same."""
    found = []
    for pieces in ([written], list(written)):
        answer = parser.create_parser(options, tail)
        events = [event for piece in pieces for event in answer.feed(piece)]
        rest, reason = answer.finish("stop")
        found.append((gather(events + rest), reason))
    (whole, reason), (pieces_message, pieces_reason) = found
    calls = [[(call.name, call.arguments) for call in each.calls] for each in (whole, pieces_message)]
    assert (whole.text, whole.reasoning, calls[0], reason) == (pieces_message.text, pieces_message.reasoning, calls[1], pieces_reason)
    return whole, reason


def calls_of(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


@pytest.mark.parametrize("sample", [each for each in SAMPLES if each.calls], ids=lambda sample: f"{sample.parser}-{SAMPLES.index(sample)}")
@pytest.mark.parametrize("times", [0, 2], ids=["dropped", "doubled"])
def test_with_a_tag_dropped_or_doubled_no_call_is_wrong(sample: Sample, times: int) -> None:
    parser = ModelParsers(sample.parser, sample.thinking)
    for tag in TAG.finditer(sample.written):
        written = sample.written[: tag.start()] + tag[0] * times + sample.written[tag.end() :]
        message, reason = read(parser, written, sample.tail)
        if reason == "tool_calls":
            assert all(call in sample.calls for call in calls_of(message)), (tag[0], written)


@pytest.mark.parametrize("sample", [each for each in SAMPLES if each.calls], ids=lambda sample: f"{sample.parser}-{SAMPLES.index(sample)}")
def test_with_a_torn_or_tripled_tag_no_call_is_wrong(sample: Sample) -> None:
    parser = ModelParsers(sample.parser, sample.thinking)
    for tag in TAG.finditer(sample.written):
        for left in (tag[0] * 3, *(tag[0][:at] for at in range(1, len(tag[0]))), *(tag[0][at:] for at in range(1, len(tag[0])))):
            written = sample.written[: tag.start()] + left + sample.written[tag.end() :]
            message, reason = read(parser, written, sample.tail)
            if reason == "tool_calls":
                assert all(call in sample.calls for call in calls_of(message)), (left, written)


@pytest.mark.parametrize(
    ("parser", "written"),
    [
        ("qwen3_coder", CALL.replace("\n</parameter>", "\n</function>", 1)),
        ("qwen3_coder", CALL.replace("</parameter>\n</function>\n</tool_call>", "</function>\n</parameter>\n</tool_call>")),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<parameter=s>\nhi\n</parameter>"),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="f">\n</minimax:tool_call>hi</parameter>\n<parameter name="i">5</parameter></invoke>',
        ),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="f">\n<parameter name="s">hi</invoke>\n<parameter name="i">5</parameter>\n</invoke>',
        ),
        (
            "glm45",
            "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>hi</arg_val\n<arg_key>i</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
        ),
    ],
)  # fmt: skip
def test_a_call_with_its_tags_in_disorder_is_not_whole(parser: str, written: str) -> None:
    assert read(ModelParsers(parser), written)[1] == "stop"


@pytest.mark.parametrize("value", ["a < b", "<b>bold</b>", "x > y", "</b>", "list<int>"])
def test_a_value_of_markup_without_its_end_is_read(value: str) -> None:
    message, reason = read(ModelParsers("qwen3_coder"), CALL.replace("hi\n</parameter>", value, 1))
    assert (calls_of(message), reason) == ([("f", {"s": value, "i": 5})], "tool_calls")


@pytest.mark.parametrize(
    ("parser", "written"),
    [
        ("qwen3_coder", CALL),
        *(("qwen3_coder", CALL.replace(tag, "")) for tag in ("<tool_call>\n", "\n</tool_call>", "</function>\n")),
        ("qwen3_coder", CALL.replace("<tool_call>\n", "").replace("\n</tool_call>", "")),
        ("qwen3_coder", CALL.replace("</parameter>\n", "")),
        ("qwen3_coder", CALL.replace("</parameter>\n", "", 1)),
        ("qwen3_coder", CALL.replace("<tool_call>", "<tool_call>\n<tool_call>")),
        ("qwen3_coder", CALL.replace("</parameter>", "</parameter>\n</parameter>")),
        *(("qwen3_coder", CALL.replace("=f>", f"={quote}f{quote}>")) for quote in ("'", '"')),
        ("glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>hi\n<arg_key>i</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>hi</arg_value>\n<arg_key>i\n<arg_value>5\n</tool_call>"),
        ("minimax_m2", '<invoke name="f">\n<parameter name="s">hi</parameter>\n<parameter name="i">5</parameter>\n</invoke>'),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">hi\n<parameter name="i">5\n</invoke>'),
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">hi\n<｜DSML｜parameter name="i" string="false">5\n'
            "</｜DSML｜invoke>",
        ),
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="True">hi</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="i" string="False">5</｜DSML｜parameter>\n</｜DSML｜invoke>',
        ),
        ("hermes", '{"name": "f", "arguments": {"s": "hi", "i": 5}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "hi", "i": 5}}'),
        ("hermes", "<tool_call>\n{'name': 'f', 'arguments': {'s': 'hi', 'i': 5}}\n</tool_call>"),
        ("hermes", "<tool_call>\n{\"name\": \"f\", \"arguments\": {'s': 'hi', 'i': 5}}\n</tool_call>"),
        ("deepseek_v3", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "hi", "i": 5}<｜tool▁call▁end｜>'),
        ("kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s": "hi", "i": 5}<|tool_call_end|>'),
    ],
)  # fmt: skip
def test_a_call_without_some_of_its_tags_is_read(parser: str, written: str) -> None:
    message, reason = read(ModelParsers(parser), written)
    assert (calls_of(message), reason) == ([("f", {"s": "hi", "i": 5})], "tool_calls")


F = '{"name": "f", "arguments": {"s": "hi", "i": 5}}'
ARGUMENTS = '{"s": "hi", "i": 5}'


@pytest.mark.parametrize(
    ("parser", "written"),
    [
        *((parser, f"<tool_call>\n{F}\n</tool_call>") for parser in ("qwen3_coder", "glm45")),
        *(("hermes", f"<tool_call>\n{each}\n</tool_call>") for each in (F[:-1], F + "}", f"[{F}]", f"```json\n{F}\n```")),
        *(("llama3_json", each) for each in (f"[{F}]", f"<|python_tag|>[{F}]<|python_end|>", F.replace('"name"', '"function"'))),
        ("phi4_mini", f"functools[{F}]"),
        ("deepseek_v3", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{ARGUMENTS}<｜tool▁calls▁end｜>"),
        ("deepseek_v3", f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        ("kimi_k2", f"<|tool_call_begin|>functions.f<|tool_call_argument_begin|>{ARGUMENTS}<|tool_calls_section_end|>"),
        (
            "deepseek_v32",
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s">hi</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="i">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        ),
    ],
)
def test_no_markup_of_a_call_is_text(parser: str, written: str) -> None:
    message, reason = read(ModelParsers(parser), written)
    assert (message.text, calls_of(message), reason) == ("", [("f", {"s": "hi", "i": 5})], "tool_calls")


def test_calls_in_a_list_of_another_form_are_all_read() -> None:
    for parser, written in (
        ("hermes", f"<tool_call>\n[{F}, {F}]\n</tool_call>"),
        ("llama3_json", f"{F}, {F}"),
        ("llama3_json", f"[{F}, {F}]"),
    ):
        message, reason = read(ModelParsers(parser), written)
        assert (message.text, calls_of(message), reason) == ("", [("f", {"s": "hi", "i": 5})] * 2, "tool_calls")


@pytest.mark.parametrize(
    ("parser", "written"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "VALUE"}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": {"s": "VALUE"}, "name": "f"}\n</tool_call>'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "VALUE"}'),
        ("kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s": "VALUE"}<|tool_call_end|>'),
        ("pythonic", '[f(s="VALUE")]'),
        ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"s": "VALUE"}<|call|>'),
    ],
)
def test_a_string_may_have_line_breaks(parser: str, written: str) -> None:
    options = ParserOptions(Tools({"f": OPTIONS.tools.schemas["f"]}))
    models = ModelParsers(parser, "harmony" if parser == "harmony" else "")
    for value in ("a\n\tb\r\n", "\n"):
        message, reason = read(models, written.replace("VALUE", value), options=options)
        assert (calls_of(message), reason) == ([("f", {"s": value})], "tool_calls")


def test_a_line_break_after_a_backslash_is_no_string_of_json() -> None:
    assert read(ModelParsers("mistral"), '[TOOL_CALLS]f[ARGS]{"s": "a\\\nb"}')[1] == "stop"


def test_a_parameter_that_comes_twice_is_no_whole_call() -> None:
    assert read(ModelParsers("qwen3_coder"), CALL.replace("<parameter=i>\n5", "<parameter=s>\nho"))[1] == "stop"


@pytest.mark.parametrize(
    "value", ["<parameter=other>\nx", "a\n<parameter=s>\nx", "</function> and </tool_call> are tags", "a </function>\n</tool_call>\nb"]
)
def test_a_value_may_have_tags_that_end_nothing(value: str) -> None:
    message, reason = read(ModelParsers("qwen3_coder"), CALL.replace("hi", value))
    assert (calls_of(message), reason) == ([("f", {"s": value, "i": 5})], "tool_calls")


def test_a_value_that_has_the_tag_of_a_parameter_that_follows_is_no_whole_call() -> None:
    """It reads as a value without an end, until the parameter comes again. Its call must not run with half of the value."""
    message, reason = read(ModelParsers("qwen3_coder"), CALL.replace("hi", "a\n<parameter=i>\nx"))
    assert len(message.calls) == 1 and reason == "stop"


def test_a_value_without_any_end_is_no_whole_call() -> None:
    for end in range(CALL.index("hi") + 1, CALL.index("\n</parameter>")):
        assert read(ModelParsers("qwen3_coder"), CALL[:end])[1] == "stop"


@pytest.mark.parametrize(
    ("parser", "written"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": NOTHING}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": NOTHING, "name": "now"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "now", "parameters": NOTHING}\n</tool_call>'),
        ("llama3_json", '{"name": "now", "parameters": NOTHING}'),
        ("llama3_json", '<|python_tag|>{"name": "now", "parameters": NOTHING}'),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": NOTHING}]'),
        ("mistral", "[TOOL_CALLS]now[ARGS]NOTHING"),
        ("granite", '<|tool_call|>[{"name": "now", "arguments": NOTHING}]'),
        ("phi4_mini", '<|tool_call|>[{"name": "now", "arguments": NOTHING}]<|/tool_call|>'),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>NOTHING<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>NOTHING<|tool_call_end|>"
            "<|tool_calls_section_end|>",
        ),
    ],
)
@pytest.mark.parametrize("nothing", ["null", "{}"])
def test_null_arguments_are_none(parser: str, written: str, nothing: str) -> None:
    message, reason = read(ModelParsers(parser), written.replace("NOTHING", nothing))
    assert (message.text, calls_of(message), reason) == ("", [("now", {})], "tool_calls")


@pytest.mark.parametrize(
    ("parser", "thinking", "written"),
    [
        ("kimi_k2", "", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|>"),
        ("harmony", "harmony", "<|channel|>commentary to=functions.now<|message|><|call|>"),
    ],
)
def test_no_arguments_before_the_end_of_a_call_are_none(parser: str, thinking: str, written: str) -> None:
    message, reason = read(ModelParsers(parser, thinking), written)
    assert (message.text, calls_of(message), reason) == ("", [("now", {})], "tool_calls")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("True", True),
        ("None", None),
        ("[True, None, 'a']", [True, None, "a"]),
        ("'it\\'s \"so\"'", 'it\'s "so"'),
        ("{'a': False}", {"a": False}),
    ],
)
def test_pythons_words_are_json(written: str, value: Any) -> None:
    options = ParserOptions(Tools({"g": {"type": "object", "properties": {"a": {"type": ["array", "object", "boolean"]}}}}))
    for head in ('{"name": "g", "arguments": ', '{"id": 1, "name": "g", "arguments": '):
        message, reason = read(ModelParsers("hermes"), f'<tool_call>\n{head}{{"a": {written}}}}}\n</tool_call>', options=options)
        assert (calls_of(message), reason) == ([("g", {"a": value})], "tool_calls")
    if isinstance(value, list | dict | bool):
        text = f"<tool_call>\n<function=g>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
        assert calls_of(read(ModelParsers("qwen3_coder"), text, options=options)[0]) == [("g", {"a": value})]


@pytest.mark.parametrize("text", ['{"answer": 42}', '{"name": "Bob", "arguments": {}}', "{it's text}", '{"name": "now"}'])
def test_an_object_without_a_tag_is_text_unless_it_is_a_call(text: str) -> None:
    message, reason = read(ModelParsers("hermes"), text)
    assert (message.text, message.calls, reason) == (text, [], "stop")


WRAPPED = {
    "hermes": "<tool_call>OBJECT</tool_call>",
    "llama3_json": "<|python_tag|>OBJECT",
    "mistral": "[TOOL_CALLS][OBJECT]",
    "granite": "<|tool_call|>[OBJECT]",
    "phi4_mini": "functools[OBJECT]",
    "qwen3_coder": "<tool_call>OBJECT</tool_call>",
}


@pytest.mark.parametrize("parser", WRAPPED)
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        *((f'{{"name": "f", "{key}": {{"s": "hi"}}}}', {"s": "hi"}) for key in ("arguments", "parameters", "args", "input")),
        ('{"type": "tool_use", "id": "x", "name": "f", "input": {"s": "hi"}}', {"s": "hi"}),
        ('{"function": {"name": "f"}, "arguments": {"s": "hi"}}', {"s": "hi"}),
        ('{"name": "f", "arguments": null, "parameters": {"s": "hi"}}', {"s": "hi"}),
        ('{"name": "f", "arguments": {"s": "hi"}, "id": "abcdefghi"}', {"s": "hi"}),
        ('{"name": "f", "s": "hi"}', None),
        ('{"name": "f", "arguments": null, "s": "hi"}', None),
        ('{"name": "f", "arguments": {}, "s": "hi"}', None),
        ('{"name": "f", "id": 5}', None),
        ('{"name": "f", "type": "file"}', None),
        ('{"name": "f", "args": {"s": "hi"}, "input": {"i": 1}}', None),
        ('{"name": "f", "arguments": false}', None),
        ("{'name': 'f', 'arguments': {'s': 1e999}}", None),
    ],
)  # fmt: skip
def test_a_call_has_all_that_its_object_holds(parser: str, written: str, arguments: Any) -> None:
    options = ParserOptions(Tools({"f": {"type": "object", "properties": {"s": {}, "i": {}, "id": {}}}}))
    text = WRAPPED[parser].replace("OBJECT", written)
    message, reason = read(ModelParsers(parser), text, options=options)
    if arguments is None:
        assert (message.text, message.calls, reason) == (text, [], "stop")
    else:
        assert (message.text, calls_of(message), reason) == ("", [("f", arguments)], "tool_calls")


@pytest.mark.parametrize("parser", WRAPPED)
@pytest.mark.parametrize("rest", ['"i": 5}', '"parameters": {"i": 5}}', '"type": "file"}', '"i": 5'])
def test_a_call_with_keys_after_its_arguments_is_not_whole(parser: str, rest: str) -> None:
    """Its arguments are on their way when the key comes, so only the finish reason can say it."""
    written = WRAPPED[parser].replace("OBJECT", '{"name": "f", "arguments": {"s": "hi"}, ' + rest)
    message, reason = read(ModelParsers(parser), written)
    assert (calls_of(message), reason) == ([("f", {"s": "hi"})], "stop")


@pytest.mark.parametrize("written", ['{"name": "f", "age": 3}', '{"name": "f"}', '{"name": "f", "input": {"s": "hi"}}', '{"name": 1}'])
def test_an_answer_of_json_is_a_call_only_with_arguments(written: str) -> None:
    message, reason = read(ModelParsers("llama3_json"), written)
    assert (message.text, message.calls, reason) == (written, [], "stop")


@pytest.mark.parametrize("written", ["[f(s=1e400)]", "[f(s=[-1e400])]", '[f(s={**{"a": 1}})]', "[f(s=1, s=2)]"])
def test_python_that_json_cannot_say_is_text(written: str) -> None:
    message, reason = read(ModelParsers("pythonic"), written)
    assert (message.text, message.calls, reason) == (written, [], "stop")


@pytest.mark.parametrize("end", ["</parameter>\n", ""])
@pytest.mark.parametrize("quote", ['"', "'"])
def test_quotes_around_a_parameters_name_are_not_part_of_it(quote: str, end: str) -> None:
    written = re.sub("<parameter=(.)>", rf"<parameter={quote}\1{quote}>", CALL).replace("</parameter>\n", end)
    assert calls_of(read(ModelParsers("qwen3_coder"), written)[0]) == [("f", {"s": "hi", "i": 5})]


def _kimi(*ids: str) -> str:
    calls = (f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for id in ids)
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


@pytest.mark.parametrize(
    ("written", "ids"),
    [
        (("functions.now:0",), ["functions.now:0"]),
        (("functions.now:3", "functions.f:4"), ["functions.now:3", "functions.f:4"]),
        (("now:1",), ["functions.now:1"]),
        (("functions.now:0", "functions.now:0"), ["functions.now:0", "functions.now:1"]),
    ],
)
def test_kimis_ids_are_as_it_wrote_them(written: tuple[str, ...], ids: list[str]) -> None:
    message, _ = read(ModelParsers("kimi_k2"), _kimi(*written))
    assert [call.id for call in message.calls] == ids


def test_a_forced_call_of_kimi_has_the_next_number_of_the_conversation() -> None:
    forced = ParserOptions(OPTIONS.tools, only_calls=True, earlier_calls=2)
    message, _ = read(ModelParsers("kimi_k2"), '[{"name": "now", "parameters": {}}, {"name": "f", "parameters": {}}]', options=forced)
    assert [call.id for call in message.calls] == ["functions.now:2", "functions.f:3"]


@pytest.mark.parametrize(("written", "kept"), [("abcdefgh9", True), ("call_1", False)])
def test_mistrals_id_is_kept_if_its_template_takes_it(written: str, kept: bool) -> None:
    (call,) = read(ModelParsers("mistral"), f"[TOOL_CALLS]now[CALL_ID]{written}[ARGS]{{}}")[0].calls
    assert (call.id == written) == kept and len(call.id) == 9 and call.id.isalnum()
