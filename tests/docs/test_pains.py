"""docs/complaints.md names tests: each of them exists, and each complaint has at least one."""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
SECTIONS = re.split(r"^## ", (HERE / "docs" / "complaints.md").read_text(), flags=re.MULTILINE)[1:]
NAMED = re.compile(r"`((?:tests|e2e)/[\w/]+\.py)::(test_\w+)`")


def test_all_fifteen_complaints_are_listed() -> None:
    assert [int(section.partition(".")[0]) for section in SECTIONS] == list(range(1, 16))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0][:40])
def test_each_complaint_is_covered_by_tests_that_pytest_collects(section: str) -> None:
    named = NAMED.findall(section)
    assert named, "name a test, or say in words why there is none and take the complaint out of this check"
    for path, name in named:
        defined = {
            node.name for node in ast.parse((HERE / path).read_text()).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in defined, f"{path} has no {name}"
