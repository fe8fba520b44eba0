"""Answers of each family are parsed correctly for every split of the text, and unreadable text is not lost."""

import json
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.parsing.samples import BROKEN, SAMPLES, SCHEMAS, Sample

from fairlead_worker.parsing.events import CallArguments, CallStart, Event, Message, gather
from fairlead_worker.parsing.families import CALLS, ModelParsers, ParserOptions
from fairlead_worker.parsing.stage import Tools


def _model_parsers(sample: Sample) -> ModelParsers:
    return ModelParsers(sample.parser, sample.thinking)


def _read(
    model_parsers: ModelParsers, pieces: Sequence[str], tail: str = "", reason: str = "stop", options: ParserOptions | None = None
) -> tuple[list[Event], str]:
    parser = model_parsers.create_parser(options or ParserOptions(Tools(SCHEMAS)), tail)
    events = [event for piece in pieces for event in parser.feed(piece)]
    rest, shown = parser.finish(reason)
    return events + rest, shown


def _without_ids(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    return message.text, message.reasoning, [(call.name, call.arguments) for call in message.calls]


def _cut(text: str, seed: int) -> list[str]:
    chance = random.Random(seed)
    size = chance.choice([1, 2, 5, 20])
    pieces, at = [], 0
    while at < len(text):
        step = chance.randint(1, size)
        pieces.append(text[at : at + step])
        at += step
    return pieces


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.parser}-{SAMPLES.index(sample)}")
def test_a_family_is_read(sample: Sample) -> None:
    events, reason = _read(_model_parsers(sample), [sample.written], sample.tail)
    message = gather(events)
    calls = [(call.name, json.loads(call.arguments)) for call in message.calls]
    assert (message.text, message.reasoning, calls) == (sample.text, sample.reasoning, sample.calls)
    assert reason == ("tool_calls" if sample.calls else "stop")
    for seed in range(20):
        cut, cut_reason = _read(_model_parsers(sample), _cut(sample.written, seed), sample.tail)
        assert (_without_ids(gather(cut)), cut_reason) == (_without_ids(message), reason)


@pytest.mark.parametrize("sample", BROKEN, ids=lambda sample: f"{sample.parser}-{BROKEN.index(sample)}")
def test_what_is_no_call_stays_text(sample: Sample) -> None:
    events, reason = _read(_model_parsers(sample), [sample.written])
    message = gather(events)
    assert message.text == sample.text
    assert [call.name for call in message.calls] == [name for name, _ in sample.calls]
    assert reason == ("tool_calls" if sample.calls else "stop")


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.parser}-{SAMPLES.index(sample)}")
def test_cut_anywhere_it_is_the_same_in_pieces_and_no_call_is_called_whole(sample: Sample) -> None:
    for end in range(len(sample.written)):
        written = sample.written[:end]
        whole, reason = _read(_model_parsers(sample), [written], sample.tail, "length")
        assert reason == "length"
        if end % 4 == 0:
            pieces, _ = _read(_model_parsers(sample), list(written), sample.tail, "length")
            assert _without_ids(gather(pieces)) == _without_ids(gather(whole))
        _, stopped = _read(_model_parsers(sample), [written], sample.tail, "stop")
        if stopped == "tool_calls":
            assert all(isinstance(json.loads(call.arguments), dict) for call in gather(whole).calls)


_WORDS = st.sampled_from(
    [
        *(
            '{"name": "now", "arguments": {',
            '"a": "b"',
            "}",
            "}}",
            "{",
            "[",
            "]",
            ", ",
            "\n",
            " ",
            '"',
            "\\",
            "<",
            "</",
            "x",
            "é🙂",
            "name",
        ),
        *("get_weather", "now", "(", ")", "()", "city=", "'", "to=functions.now ", "function", "<parameter=city>", "</parameter>"),
        *("<function=now>", "</function>", "<think>", "</think>", "[THINK]", "[/THINK]", "[ARGS]", "<arg_key>a</arg_key>", "<arg_value>"),
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json\n"),
        *("<｜tool▁call▁end｜>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "analysis", "final", "commentary"),
        *("<|python_tag|>", "<|python_start|>", "<|tool_call|>", "<|tool_call_begin|>functions.now:0", "<|tool_call_argument_begin|>"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["harmony", *CALLS]), st.lists(_WORDS, max_size=25).map("".join), st.integers(0, 10**6))
def test_any_text_is_read_the_same_in_any_pieces(parser: str, written: str, seed: int) -> None:
    model_parsers = ModelParsers(parser, parser if parser == "harmony" else "mistral" if parser == "mistral" else "think")
    whole, reason = _read(model_parsers, [written])
    pieces, pieces_reason = _read(model_parsers, _cut(written, seed))
    assert (_without_ids(gather(pieces)), pieces_reason) == (_without_ids(gather(whole)), reason)
    if not gather(whole).calls and parser != "harmony" and not written.lstrip().startswith(("<think>", "[THINK]")):
        assert gather(whole).text == written, "something is lost"


def test_arguments_stream_as_openai_streams_them() -> None:
    sample = SAMPLES[1]
    events, _ = _read(_model_parsers(sample), list(sample.written))
    assert isinstance(events[0], CallStart) and events[0].id.startswith("call_") and events[0].index == 0
    assert len(events) > 10 and all(isinstance(event, CallArguments) for event in events[1:])


def test_ids_are_what_the_family_takes() -> None:
    events, _ = _read(ModelParsers("mistral"), ["[TOOL_CALLS]now[ARGS]{}"])
    (call,) = gather(events).calls
    assert len(call.id) == 9 and call.id.isalnum()


def test_a_long_string_streams_before_its_parameter_ends() -> None:
    parser = ModelParsers("qwen3_coder").create_parser(ParserOptions(Tools(SCHEMAS)), "")
    events = parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\nA long tale")
    assert "".join(event.text for event in events if isinstance(event, CallArguments)) == '{"city": "A long tale'


def test_one_call_and_no_more() -> None:
    sample = SAMPLES[3]
    options = ParserOptions(Tools(SCHEMAS, at_most_one=True))
    for pieces in ([sample.written], list(sample.written)):
        parser = _model_parsers(sample).create_parser(options, "")
        events: list[Event] = []
        for piece in pieces:
            if not parser.complete:
                events += parser.feed(piece)
        assert parser.complete
        rest, reason = parser.finish("stop")
        assert len(gather(events + rest).calls) == 1 and reason == "tool_calls"


def test_no_tools_no_calls() -> None:
    assert not ModelParsers("hermes").needs_parser(ParserOptions())
    for sample in SAMPLES:
        events, reason = _read(_model_parsers(sample), [sample.written], sample.tail, options=ParserOptions())
        assert not gather(events).calls and reason == "stop"


@pytest.mark.parametrize("cut", ["[", '[{"na', '[{"name": "get_w', '[{"name": "get_weather", "parameters": '])
def test_the_beginning_of_a_forced_call_is_no_text(cut: str) -> None:
    """It was cut by its length or by a stop string, with or without a complete call before it."""
    whole = '[{"name": "get_weather", "parameters": {}}'
    for text, calls in ((cut, 0), (f"{whole}, {cut.removeprefix('[')}", 1)):
        for pieces in ([text], list(text)):
            events, reason = _read(ModelParsers(), pieces, reason="length", options=ParserOptions(Tools(SCHEMAS), only_calls=True))
            answer = gather(events)
            assert (answer.text, len(answer.calls), reason) == ("", calls, "length")


def test_forced_calls() -> None:
    written = '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "now", "parameters": {}}]'
    for pieces in ([written], list(written)):
        events, reason = _read(ModelParsers(), pieces, options=ParserOptions(Tools(SCHEMAS), only_calls=True))
        assert [call.name for call in gather(events).calls] == ["get_weather", "now"] and reason == "tool_calls"
        assert not gather(events).text
    events, reason = _read(
        ModelParsers(),
        list('{"city": "Pa'),
        reason="length",
        options=ParserOptions(Tools(SCHEMAS), only_calls=True, required_tool="get_weather"),
    )
    assert _without_ids(gather(events)) == ("", "", [("get_weather", '{"city": "Pa')]) and reason == "length"


def test_reasoning_tokens_are_counted() -> None:
    parser = ModelParsers("", "think").create_parser(ParserOptions(), "<think>\n")
    for token in ("I", " think", "</think>", "\n\n", "Yes", "."):
        parser.feed(token)
    assert parser.reasoning_tokens == 3


@pytest.mark.parametrize("parser", [*CALLS, "harmony"])
def test_a_run_of_blanks_costs_no_more_than_its_length(parser: str) -> None:
    """A model that writes blanks forever, after a call or before its parts, must not delay other streams."""
    sample = next(each for each in SAMPLES if each.parser == parser and each.calls)
    model_parsers = _model_parsers(sample)
    for begun in (sample.written, sample.written.rpartition("}")[0] + "}", *sorted({*model_parsers.collect_markers().split("\0")} - {""})):
        read = model_parsers.create_parser(ParserOptions(Tools(SCHEMAS)), sample.tail)
        read.feed(begun)
        began = time.process_time()
        for _ in range(500):
            read.feed(" " * 40)
        read.feed("x")
        assert time.process_time() - began < 2, "seconds of the event loop for 20,000 blanks, which take a hundredth of one"


@pytest.mark.parametrize("tail", ["a" + ".b" * 2000 + "()", "now(x=" + "-" * 2000 + "1)", "now(x=" + "1+" * 2000 + "1)"])
def test_python_that_is_nested_too_deeply_is_text(tail: str) -> None:
    written = f"[{next(iter(SCHEMAS))}(), {tail}]"
    events, reason = _read(ModelParsers("pythonic"), [written])
    assert (gather(events).text, gather(events).calls, reason) == (written, [], "stop")


@pytest.mark.parametrize(
    ("declared", "written", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "2024", "2024"),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "7", 7),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}, "[1]", [1]),
        ({"type": "integer"}, "seven", "seven"),
        ({}, "7", 7),
    ],
)
def test_a_parameter_is_of_a_type_that_its_schema_allows(declared: dict[str, object], written: str, value: object) -> None:
    """pydantic's `str | None` is `anyOf` of both types, so a year is not a number then."""
    options = ParserOptions(Tools({"f": {"type": "object", "properties": {"a": declared}}}))
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
    (call,) = gather(_read(ModelParsers("qwen3_coder"), [text], options=options)[0]).calls
    assert json.loads(call.arguments) == {"a": value}
