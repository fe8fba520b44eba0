"""`python -m bench`: the list names every benchmark, and every report names the machine that it ran on."""

import argparse
import json
import sys
from pathlib import Path

import pytest
from bench.common.report import benchmark_name, make_parser, write_report

from bench import __main__ as runner
from bench import catalog

MACHINE_FACTS = {"cpu", "cores", "cpu_level", "torch", "commit", "date"}


def test_every_benchmark_has_one_line_in_the_list() -> None:
    lines = catalog.format_list().splitlines()
    for name, summary in catalog.benchmarks().items():
        assert 0 < len(summary) <= 110, f"{name}: the first line of its docstring should be one short sentence, not {summary!r}"
        assert any(line.split() == [*name.split(), *summary.split()] for line in lines)


def test_a_folder_holds_at_most_twenty_entries() -> None:
    folders = [path for path in (catalog.HERE, *catalog.HERE.rglob("*")) if path.is_dir() and path.name not in ("__pycache__", "results")]
    sizes = {folder: sum(entry.name != "__pycache__" for entry in folder.iterdir()) for folder in folders}
    assert max(sizes.values()) <= 20, sizes


@pytest.mark.parametrize("name", sorted(catalog.benchmarks()))
def test_every_benchmark_parses_its_options(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runner.main()
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and shown.startswith(f"usage: python -m bench {name} ") and "--json FILE" in shown


def test_a_folder_with_one_benchmark_is_its_name() -> None:
    assert catalog.full_name("quality") == "quality/likelihood" == catalog.full_name("quality/likelihood")
    assert catalog.full_name("engine") == "engine", "it has several"


def test_an_unknown_name_is_refused_with_the_nearest_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "step_time"])
    assert runner.main() == 2
    assert "no benchmark is called 'step_time'. Did you mean engine/step_time?" in capsys.readouterr().err


def test_a_report_has_the_machine_the_options_and_the_results(tmp_path: Path) -> None:
    options = argparse.Namespace(json=tmp_path / "deep" / "report.json", threads=2, cache=tmp_path)
    write_report("bench.engine.step_time", options, {"p50": 1.5})
    written = json.loads(options.json.read_text())
    assert written["benchmark"] == benchmark_name("bench.engine.step_time") == "engine/step_time"
    assert written["machine"].keys() >= MACHINE_FACTS and all(written["machine"].values())
    assert written["options"] == {"threads": 2, "cache": str(tmp_path)} and written["results"] == {"p50": 1.5}


def test_without_json_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_report("bench.engine.step_time", make_parser("bench.engine.step_time", "").parse_args([]), {})
    assert not list(tmp_path.iterdir())
