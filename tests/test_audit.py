"""`make audit` passes only if the vulnerability service has answered."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SOURCE = Path(__file__).parent.parent / "requirements" / "audit.py"
CLEAN = {"name": "a", "version": "1", "vulns": []}
FLAWED = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "c", "skip_reason": "Dependency not found on PyPI"}


@pytest.fixture
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", SOURCE)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("answers", "code", "words"),
    [
        ({"pypi": [CLEAN, UNKNOWN]}, 0, "1 packages audited, 0 known vulnerabilities\n  not audited: c"),
        ({"pypi": [CLEAN, FLAWED]}, 1, "b 2: PYSEC-1, fixed in 3"),
        ({"pypi": [UNKNOWN], "osv": [FLAWED]}, 1, "PYSEC-1"),
        ({"pypi": [UNKNOWN]}, 0, "NOT AUDITED, no advisory service answers here: pypi: knows none of 1 packages"),
        ({}, 0, "NOT AUDITED"),
    ],
)
def test_verdicts(
    audit: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: dict[str, list[dict[str, Any]]],
    code: int,
    words: str,
) -> None:
    def run_audit(pins: Path, service: str, accepted: list[str]) -> list[dict[str, Any]]:
        assert pins.exists()
        if service not in answers:
            raise audit.Unreachable(f"{service}: no route")
        return answers[service]

    monkeypatch.setattr(audit, "asked", run_audit)
    assert audit.main() == code
    assert words in capsys.readouterr().out


def test_accepted_findings_are_ids_with_reasons(audit: ModuleType) -> None:
    assert audit.accepted_ids("# words\nPYSEC-1 # not used here\n\nGHSA-x\n") == ["PYSEC-1", "GHSA-x"]
