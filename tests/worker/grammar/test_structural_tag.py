"""xgrammar's structural tags accept the texts that they describe, and no others."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.worker.api.generation.tool_model import make_tool_model

from fairlead.random_model.build import make_model
from fairlead_worker.grammar.compiler import Compiler
from fairlead_worker.grammar.constraint import Constraint
from fairlead_worker.grammar.lower import lower

A = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</a>"}
B = {"type": "tag", "begin": "<b>", "content": {"type": "any_text"}, "end": ["</b>", "</c>"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("tags")
    return make_tool_model(make_model(base / "tiny", "qwen3", vocab=1024, layers=1), base / "tools")


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Compiler:
    return Compiler((folder / "tokenizer.json").read_text(), 1024, [1])


def lowered(compiler: Compiler, format: Any) -> str:
    return lower(Constraint("structural_tag", msgspec.json.encode({"format": format}).decode(), "f"), compiler.special)


def accepts(compiler: Compiler, format: Any, text: str) -> bool:
    matcher = compiler.matcher(lowered(compiler, format))
    tokens = compiler._tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ({"type": "const_string", "value": "hi there"}, ["hi there"], ["hi", "hi there!"]),
        ({"type": "regex", "pattern": "a/[0-9]+\n?"}, ["a/12", "a/1\n"], ["a/", "b"]),
        ({"type": "json_schema", "json_schema": {"type": "boolean"}}, ["true"], ["1"]),
        ({"type": "any_text"}, ["", "what\never"], []),
        ({"type": "or", "elements": [A, B]}, ["<a>5</a>", "<b>x < y</b>", "<b>x</c>"], ["<a>x</a>", "<b>x", "<a>5</a><b></b>"]),
        (
            {"type": "sequence", "elements": [{"type": "const_string", "value": "go: "}, B, A, {"type": "any_text"}]},
            ["go: <b>free</b><a>1</a> and more", "go: <b></b><a>1</a>"],
            ["<b>free</b><a>1</a>", "go: <b>free</b>"],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": [A, B]},
            ["", "free", "free <a>1</a> more <b>x</b> end"],
            ["<a>x</a>", "free <a>1", "x <b>open"],
        ),
        ({"type": "triggered_tags", "triggers": ["<a"], "tags": [A], "at_least_one": True}, ["so <a>1</a>"], ["so", ""]),
        (
            {"type": "triggered_tags", "triggers": ["<a"], "tags": [A], "at_least_one": True, "stop_after_first": True},
            ["so <a>1</a>"],
            ["so <a>1</a> more"],
        ),
        ({"type": "tags_with_separator", "tags": [A, B], "separator": ", "}, ["", "<a>1</a>", "<a>1</a>, <b>x</b>"], ["<a>1</a>,"]),
        (
            {"type": "tags_with_separator", "tags": [A], "separator": ",", "at_least_one": True, "stop_after_first": True},
            ["<a>1</a>"],
            ["", "<a>1</a>,<a>2</a>"],
        ),
        (
            {"type": "tag", "begin": "<tool_call>", "content": {"type": "any_text"}, "end": "</tool_call>"},
            ["<tool_call>x</tool_call>"],
            ["<tool_call>x"],
        ),
    ],
)
def test_a_format_accepts_its_texts(compiler: Compiler, format: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(compiler, format, text)] == []
    assert [text for text in bad if accepts(compiler, format, text)] == []


@pytest.mark.parametrize(
    ("format", "reason"),
    [
        ({"type": "grammar"}, "format.type: 'grammar' is not supported"),
        ({}, "format.type: None is not supported"),
        (5, "format: must be an object"),
        ({"type": "const_string"}, "format.value: must be a string"),
        ({"type": "or", "elements": []}, "format.elements: must be a list"),
        ({"type": "tag", "begin": "a", "content": {"type": "x"}}, "format.content.type: 'x'"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, A]}, r"format.elements\[0\]: any_text ends a sequence"),
        ({"type": "triggered_tags", "triggers": ["<c"], "tags": [A]}, r"format.tags\[0\].begin: '<a>' begins with none"),
        ({"type": "json_schema"}, "format.json_schema: must be a JSON schema"),
    ],
)
def test_an_unsupported_format_is_named(compiler: Compiler, format: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        lowered(compiler, format)


def test_formats_are_not_nested_without_bound(compiler: Compiler) -> None:
    deep: Any = {"type": "any_text"}
    for _ in range(40):
        deep = {"type": "or", "elements": [deep]}
    with pytest.raises(ValueError, match="nested more than 32 deep"):
        lowered(compiler, deep)
