# ruff: noqa: E501 - answers as they were written
"""Sample answers of each family in the format of its chat template, and their meaning."""

from dataclasses import dataclass, field
from typing import Any

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "places": {"type": "array"},
        "note": {"type": "string"},
        "exact": {"type": "boolean"},
    },
}
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}}}
PARIS, OSLO = {"city": "Paris", "days": 3}, {"city": 'Åre {"x"} </b> é🙂', "places": [1, {"a": []}], "note": "two\nlines"}


@dataclass(frozen=True)
class Sample:
    """One answer."""

    parser: str
    """The tool call parser."""
    written: str
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    thinking: str = ""
    """The reasoning parser."""
    tail: str = ""
    """The end of the prompt."""


def _hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


_OSLO_JSON = '{"city": "Åre {\\"x\\"} </b> é🙂", "places": [1, {"a": []}], "note": "two\\nlines"}'
_PARIS_JSON = '{"city": "Paris", "days": 3}'
_BOTH = [("get_weather", PARIS), ("get_weather", OSLO)]
_DS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def _v3(arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def _v31(arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


SAMPLES = [
    Sample("hermes", "Only <text> with a <tool_cal and {braces}.\n", "Only <text> with a <tool_cal and {braces}.\n"),
    Sample("hermes", _hermes("get_weather", _PARIS_JSON), calls=[("get_weather", PARIS)]),
    Sample("hermes", "Let me see.\n\n" + _hermes("now", "{}") + "\n", "Let me see.", calls=[("now", {})]),
    Sample("hermes", _hermes("get_weather", _PARIS_JSON) + "\n" + _hermes("get_weather", _OSLO_JSON), calls=_BOTH),
    Sample("hermes", '<tool_call>{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}</tool_call>', calls=_BOTH[:1]),
    Sample("hermes", '<tool_call>{"name": "now"}</tool_call>', calls=[("now", {})]),
    Sample("hermes", '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}\n</tool_call>', calls=_BOTH[:1]),
    Sample(
        "hermes",
        "I should look.\n</think>\n\nSure.\n" + _hermes("get_weather", _PARIS_JSON),
        "Sure.",
        "I should look.",
        _BOTH[:1],
        "qwen3",
        "<|im_start|>assistant\n<think>\n",
    ),
    Sample("hermes", "<think>\nHm </thin\n</think>\n\nYes.", "Yes.", "Hm </thin", thinking="think"),
    Sample("hermes", "No thought.", "No thought.", thinking="think"),
    Sample("hermes", "Yes.", "Yes.", thinking="deepseek_r1", tail="<think>\n\n</think>\n\n"),
    Sample("hermes", "thought</think>Yes.", "Yes.", "thought", thinking="deepseek_r1"),
    Sample(
        "qwen3_coder",
        "I call.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nÅre {\"x\"} </b> é🙂\n</parameter>\n<parameter=places>\n[1, {\"a\": []}]"
        "\n</parameter>\n<parameter=note>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
        "</tool_call>",
        "I call.",
        calls=[("get_weather", OSLO), ("now", {})],
    ),
    Sample(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=other>\nfree text\n</parameter>\n</function>\n</tool_call>",
        calls=[("get_weather", {"exact": True, "other": "free text"})],
    ),
    Sample(
        "glm45",
        "<think>Hm</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        reasoning="Hm",
        calls=[("get_weather", PARIS), ("now", {})],
        thinking="think",
    ),
    Sample(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        calls=[("get_weather", PARIS), ("now", {})],
    ),
    Sample(
        "deepseek_v32",
        'So:\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "So:",
        calls=_BOTH[:1],
    ),
    Sample("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', calls=_BOTH[:1]),
    Sample("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": ' + _PARIS_JSON + '}; {"name": "now", "parameters": {}}',
           calls=[("get_weather", PARIS), ("now", {})]),
    Sample("llama3_json", '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', calls=_BOTH[:1]),
    Sample("llama3_json", '{"answer": 42, "why": "{"}', '{"answer": 42, "why": "{"}'),
    Sample("llama3_json", 'It is {"name": "now", "parameters": {}}', 'It is {"name": "now", "parameters": {}}'),
    Sample("pythonic", "[get_weather(city='Paris', days=3), now()]", calls=[("get_weather", PARIS), ("now", {})]),
    Sample("pythonic", '<|python_start|>[get_weather(city="Paris", exact=true, places=[1, {"a": -2}])]<|python_end|>',
           calls=[("get_weather", {"city": "Paris", "exact": True, "places": [1, {"a": -2}]})]),
    Sample("pythonic", "[1] says so, [now] too.", "[1] says so, [now] too."),
    Sample("pythonic", "[get_weather(city=__import__('os'))] !", "[get_weather(city=__import__('os'))] !"),
    Sample("mistral", "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": " + _PARIS_JSON + "}, {\"name\": \"get_weather\", \"arguments\": "
           + _OSLO_JSON + ', "id": "abcdefghi"}]', calls=_BOTH),
    Sample("mistral", "Well.[TOOL_CALLS]get_weather[ARGS]" + _PARIS_JSON + "[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]" + _OSLO_JSON,
           "Well.", calls=_BOTH),
    Sample("mistral", "[THINK]Hm[/THINK]Yes", "Yes", "Hm", thinking="mistral"),
    Sample("deepseek_v3", _DS[0] + _v3(_PARIS_JSON) + "\n" + _v3(_OSLO_JSON) + _DS[1], calls=_BOTH),
    Sample("deepseek_v3", "Hm.</think>So:" + _DS[0] + _v31(_PARIS_JSON) + _v31(_OSLO_JSON) + _DS[1], "So:", "Hm.", _BOTH, "deepseek_v3",
           "<｜Assistant｜><think>"),
    Sample(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>" + _PARIS_JSON
        + "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        calls=[("get_weather", PARIS), ("now", {})],
    ),
    Sample("granite", '<|tool_call|>[{"name": "get_weather", "arguments": ' + _PARIS_JSON + '}, {"name": "now", "arguments": {}}]',
           calls=[("get_weather", PARIS), ("now", {})]),
    Sample("granite", "Here is my thought process: hm.\n\nHere is my response: yes.", "yes.", "hm.", thinking="granite"),
    Sample("phi4_mini", '<|tool_call|>[{"name": "get_weather", "arguments": ' + _PARIS_JSON + '}]<|/tool_call|>', calls=_BOTH[:1]),
    Sample(
        "harmony",
        "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + _PARIS_JSON,
        "I look.",
        "I need the weather.",
        _BOTH[:1],
        "harmony",
    ),
    Sample(
        "harmony",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        "",
        "Hm",
        [("now", {})],
        "harmony",
    ),
    Sample("harmony", "<|channel|>final<|message|>Yes.\n<|return|>", "Yes.\n", thinking="harmony"),
    Sample("harmony", "No channel here.", "No channel here.", thinking="harmony"),
]  # fmt: skip

BROKEN = [
    # (parser, text written, text that remains, calls)
    Sample("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    Sample("hermes", "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>"),
    Sample("hermes", '<tool_call>{"name": "now" </tool_call> so', '<tool_call>{"name": "now" </tool_call> so'),
    Sample("hermes", '<tool_call>{"name": "no', '<tool_call>{"name": "no'),
    Sample("hermes", '<tool_call>{"nam": "x"}</tool_call>' + _hermes("now", "{}"), '<tool_call>{"nam": "x"}</tool_call>', calls=[("now", {})]),
    Sample("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>", "<tool_call>\n<function=unknown>\n</function>"),
    Sample("mistral", "[TOOL_CALLS] is a marker", "[TOOL_CALLS] is a marker"),
    Sample("deepseek_v3", _DS[0] + "x", _DS[0] + "x"),
    Sample("pythonic", "[now(", "[now("),
    Sample("pythonic", "[now(1)]", "[now(1)]"),
    Sample("llama3_json", '{"name": "now", "param', '{"name": "now", "param'),
    Sample("harmony", "<|channel|>final<|mess", "<|channel|>final<|mess", thinking="harmony"),
]  # fmt: skip
