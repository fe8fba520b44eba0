"""The pages of the documentation are short, do not scroll sideways, and name tests and benchmarks that exist."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from bench.catalog import benchmarks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WORDS, CODE_COLUMNS = 1_500, 90
TEST = re.compile(r"`((?:tests/|e2e/)?[\w/]+/test_\w+\.py)(?:::(test_\w+))?`")


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_generate_{name}", DOCS / "generate" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))} | _load("api").pages()


def code_lines(text: str) -> list[str]:
    """Return the lines of the fenced code blocks of a page."""
    lines, fence = [], ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("```"):
            fence = "" if fence else stripped
        elif fence and not fence.startswith("```mermaid"):
            lines.append(line)
    return lines


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_at_most_1500_words(page: str) -> None:
    words = len(PAGES[page].split())
    assert words <= WORDS, f"{page} has {words} words: split it"


@pytest.mark.parametrize("page", PAGES)
def test_no_code_line_scrolls_sideways(page: str) -> None:
    wide = [line for line in code_lines(PAGES[page]) if len(line) > CODE_COLUMNS]
    assert not wide, wide


def test_every_benchmark_is_on_the_index_page() -> None:
    page = PAGES["benchmarks/index.md"]
    assert [name for name in benchmarks() if f"| `{name}` |" not in page] == []


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("page", ["design/threat-model.md", "operate/security.md", "concepts/faults.md", "guides/weights.md"])
def test_named_tests_exist(page: str) -> None:
    named = TEST.findall(PAGES[page])
    assert named
    for path, name in named:
        file = ROOT / path if path.startswith(("tests/", "e2e/")) else ROOT / "tests" / path
        assert file.exists(), path
        assert not name or name in functions_of(file), f"{path} has no {name}"
