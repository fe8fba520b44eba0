"""docs/complaints.md names tests: each of them exists, and each complaint has at least one."""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent
LINES = [line for line in (HERE / "docs" / "complaints.md").read_text().splitlines() if re.match(r"\| \d+\. ", line)]
NAMED = re.compile(r"`((?:tests|e2e)/[\w/]+\.py)::(test_\w+)`")


def test_all_fifteen_complaints_are_listed() -> None:
    assert [int(re.match(r"\| (\d+)\.", line).group(1)) for line in LINES] == list(range(1, 16))  # type: ignore[union-attr]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("|")[1].strip()[:40])
def test_each_complaint_is_covered_by_tests_that_pytest_collects(line: str) -> None:
    named = NAMED.findall(line)
    assert named, "name a test, or say in words why there is none and take the pain out of this check"
    for path, name in named:
        defined = {
            node.name for node in ast.parse((HERE / path).read_text()).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in defined, f"{path} has no {name}"
