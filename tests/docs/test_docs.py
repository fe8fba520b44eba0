"""The pages of the documentation are short, do not scroll sideways, and name tests and benchmarks that exist."""

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
from bench.catalog import benchmarks
from pydantic import BaseModel

from fairlead.main import COMMANDS
from fairlead.program import Command, load_command
from fairlead_common.metric_aliases import SHARED_WITH_VLLM
from fairlead_common.routing_policy import CHOICES, RoutingPolicy
from fairlead_operator.api.owned_flags import ENGINE_FLAGS
from fairlead_operator.api.spec import ServiceSpec
from fairlead_router.app import App
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.interop.stack_metrics import StackMetrics
from fairlead_worker.api.metrics.vllm_names import OLDER
from fairlead_worker.config import WorkerConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WORDS, CODE_COLUMNS = 1_500, 90
OTHER_PROGRAMS_FLAGS = {
    "cascade",
    "data-parallel-size",
    "location",
    "reset-then-reuse-values",
    "reuse-values",
    "set",
    "skip-tests",
    "take-ownership",
}
"""Flags of helm, kubectl, curl and vLLM that the pages explain."""
OTHER_VARIABLES = {"FAIRLEAD_CPU_ISA", "FAIRLEAD_INSECURE_REGISTRIES", "FAIRLEAD_ROLLOUT_SEEDS"}
LINK = re.compile(r"(?<!`)\]\(([^)#\s]+)(?:#[^)]*)?\)")
FUNCTION = re.compile(r"`([\w/]+\.py)::([A-Za-z_.]+)`")
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


@pytest.mark.parametrize("page", ["start/what-is-fairlead.md", "start/inference-service.md"])
def test_the_pages_for_newcomers_have_at_most_500_words(page: str) -> None:
    assert len(PAGES[page].split()) <= 500


def test_the_page_of_an_inference_service_shows_the_smallest_example() -> None:
    [manifest] = re.findall(r"^```yaml\n(.*?)^```", PAGES["start/inference-service.md"], re.S | re.M)
    assert manifest == (ROOT / "examples" / "minimal.yaml").read_text()


def test_the_page_of_flags_has_each_field_of_the_manifest() -> None:
    page = PAGES["reference/manifest-to-flags.md"]
    sections = {name: part for part in page.split("\n## ") for name in re.findall(r"spec\.(\w+)", part.partition("\n")[0])}
    missing = []
    for field in ServiceSpec.model_fields.values():
        section = sections.get(str(field.alias))
        if section is None:
            missing += [] if field.alias in _named(page) else [f"spec.{field.alias}"]
            continue
        [part] = [one for one in (field.annotation, *get_args(field.annotation)) if isinstance(one, type) and issubclass(one, BaseModel)]
        flags = WorkerConfig.model_fields if field.alias == "engine" else {}
        names = {str(one.alias): name for name, one in part.model_fields.items()}
        missing += [f"spec.{field.alias}.{alias}" for alias in names.keys() - _named(section) if names[alias] not in flags]
    missing = [path for path in missing if f"`{path}`" not in page]  # `spec.engine.args` is above the sections
    assert missing == [], "name it on the page, with what it sets"


def _named(text: str) -> set[str]:
    """Return the fields in backticks, each part of `kvCache.size` too."""
    return {part for path in re.findall(r"`([\w.]+)[`:]", text) for part in path.split(".")}


def test_the_page_of_routing_has_each_policy() -> None:
    assert get_args(RoutingPolicy) == tuple(CHOICES)
    assert [name for name in CHOICES if f"| `{name}` |" not in PAGES["concepts/routing.md"]] == [], "add a row to the table of policies"


def test_the_page_of_tracing_has_each_field_of_the_access_log() -> None:
    fields = set(re.findall(r"(\w+)=\{", inspect.getsource(App._log)))
    assert len(fields) > 10 and fields - _named(PAGES["operate/tracing.md"].partition("### The router's access log")[2]) == set()


def test_the_page_of_the_router_has_each_of_its_folders() -> None:
    folders = {path.parent.name for path in (ROOT / "router" / "fairlead_router").glob("*/__init__.py")}
    assert {folder for folder in folders if f"| `{folder}/` |" not in PAGES["design/router/index.md"]} == set()


def test_the_matrix_of_engines_has_a_row_for_each_field() -> None:
    rows = [line.split(" | ") for line in _load("reference").engines_page().splitlines() if line.startswith("| `")]
    assert len(rows) > 15 and all(len(row) == 4 for row in rows)


def test_the_page_of_vllms_metric_names_has_all_of_them() -> None:
    _, workers, routers, _ = (set(re.findall(r"`([a-z0-9_]{6,})`", part)) for part in PAGES["reference/vllm-metrics.md"].split("\n## "))
    assert workers - {"model_name", "fairlead_"} == {*SHARED_WITH_VLLM, *OLDER.values()} - {
        f"gpu_{name}" for name in SHARED_WITH_VLLM if name.startswith("prefix_cache")
    }
    families = StackMetrics(WorkerTable(), lambda: "m").collect()
    assert routers == {f"{one.name}_total" if one.type == "counter" else one.name for one in families for one.name in [one.name[5:]]}


def test_the_charts_readme_is_generated_from_its_values() -> None:
    reference = _load("reference")
    assert reference.CHART_README.read_text() == reference.chart_readme(), "run `make chart-readme`"


def test_the_page_of_quality_is_generated_from_its_reports() -> None:
    assert PAGES["benchmarks/quality.md"] == _load("quality").page(), "run `.venv/bin/python docs/generate/quality.py`"


def test_links_lead_to_files_of_the_repository() -> None:
    """Also those to generated pages, of which the repository has placeholders that say where they are built."""
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "charts/fairlead/README.md", ROOT / "tests/README.md"]
    found = [(page, link) for page in pages for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [f"{page.relative_to(ROOT)}: {link}" for page, link in found if not (page.parent / link).exists()] == []
    assert len(found) > 100
    assert [path for path in _load("api").pages() if "`make docs` builds" not in " ".join((DOCS / path).read_text().split())] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_code_line_scrolls_sideways(page: str) -> None:
    wide = [line for line in code_lines(PAGES[page]) if len(line) > CODE_COLUMNS]
    assert not wide, wide


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_pages_of_the_repository_are_short_and_narrow(page: str) -> None:
    lines = (ROOT / page).read_text().splitlines()
    assert len(lines) <= 120
    assert [line for line in code_lines("\n".join(lines)) if len(line) > CODE_COLUMNS] == []


def test_every_benchmark_is_on_the_index_page() -> None:
    page = PAGES["benchmarks/index.md"]
    assert [name for name in benchmarks() if f"| `{name}` |" not in page] == []


def test_named_benchmarks_exist() -> None:
    named = {name for text in PAGES.values() for name in re.findall(r"python -m bench ([a-z_]+/[a-z_]+)", text)}
    assert named
    assert named - set(benchmarks()) == set()


def _cli_flags(commands: Iterable[Command]) -> set[str]:
    """Return the flags of `fairlead` and its subcommands, without dashes."""
    waiting, found = [load_command(command) for command in commands], {"version", "install-completion", "show-completion"}
    for command in waiting:
        found |= {flag.lstrip("-") for parameter in command.params for flag in parameter.opts}
        waiting += getattr(command, "commands", {}).values()
    return found


def test_named_flags_exist() -> None:
    reference = _load("reference")
    others = (reference.AgentConfig, reference.RouterConfig, reference.BatchConfig, reference.OperatorConfig)
    pages = [reference.worker_flags_page(), *(reference.flags_page("", config) for config in others)]
    served = set(re.findall(r"`--([a-z-]+)`", "".join(pages)))
    sources = [path.read_text() for path in (ROOT / "bench").rglob("*.py")]
    engines = {flag for flags in ENGINE_FLAGS.values() for flag in flags}
    ours = _cli_flags(COMMANDS) | served | engines | {f"no-{flag}" for flag in served} | set(re.findall(r'"--([a-z-]+)"', "".join(sources)))
    stale = {
        (page, flag)
        for page, text in PAGES.items()
        for flag in re.findall(r"`--([a-z-]+)", text)
        if flag not in ours | OTHER_PROGRAMS_FLAGS
    }
    assert stale == set()


def test_named_settings_exist() -> None:
    """Keys of `--limits` and variables, in all pages."""
    reference = _load("reference")
    configs = (reference.AgentConfig, reference.WorkerConfig, reference.RouterConfig, reference.OperatorConfig)
    known = {f"FAIRLEAD_{name.upper()}" for config in configs for name in config.model_fields} | OTHER_VARIABLES
    named = {(page, name) for page, text in PAGES.items() for name in re.findall(r"`(FAIRLEAD_[A-Z_]+[A-Z])\b", text)}
    keys = {(page, key) for page, text in PAGES.items() for key in re.findall(r"`--limits ([a-z_]+)", text)}
    assert {each for each in named if each[1] not in known} == set()
    assert keys and {each for each in keys if each[1] not in reference.Limits.model_fields} == set()


def test_named_metrics_exist() -> None:
    reference = _load("reference")
    served = set(re.findall(r"`(fairlead_[a-z0-9_]+)`", reference.metrics_page()))
    series = served | {f"{name}{end}" for name in served for end in ("_bucket", "_sum", "_count")}
    recorded = re.compile(r"\bservice:fairlead_\w+:\w+")  # of templates/_slo.tpl; tests of the chart check their names
    named = {(page, name) for page, text in PAGES.items() for name in re.findall(r"\bfairlead_[a-z0-9_]+", recorded.sub("", text))}
    packages = {"fairlead_agent", "fairlead_common", "fairlead_index", "fairlead_operator", "fairlead_router", "fairlead_worker"}
    assert {each for each in named if each[1] not in series | packages} == set()


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_named_functions_exist() -> None:
    """`serving/proxy.py::Proxy.choose`, below one of the packages that the page names, or below the repository."""
    roots = [ROOT, *(path for path in ROOT.glob("*/fairlead*") if (path / "__init__.py").exists())]
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(FUNCTION.findall(contributing)) > 5, "CONTRIBUTING names what to change as `path.py::name`"
    for page, text in {**PAGES, "CONTRIBUTING.md": contributing}.items():
        for path, name in FUNCTION.findall(text):
            if not Path(path).name.startswith("test_"):
                files = [root / path for root in roots if (root / path).exists()]
                assert len(files) == 1, f"{page}: {path} is in {len(files)} packages"
                assert name in definitions_of(files[0]), f"{page}: {path} has no {name}"


@cache
def definitions_of(path: Path) -> set[str]:
    """Return the functions, classes and variables of a module, and the methods of its classes as `Class.method`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    body = ast.parse(path.read_text()).body
    targets = [target for node in body for target in getattr(node, "targets", [getattr(node, "target", None)])]
    variables = {target.id for target in targets if isinstance(target, ast.Name)}
    top = [node for node in body if isinstance(node, kinds)]
    methods = {f"{node.name}.{one.name}" for node in top if isinstance(node, ast.ClassDef) for one in node.body if isinstance(one, kinds)}
    return {node.name for node in top} | methods | variables


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if TEST.search(text)])
def test_named_tests_exist(page: str) -> None:
    for path, name in TEST.findall(PAGES[page]):
        file = ROOT / path if path.startswith(("tests/", "e2e/")) else ROOT / "tests" / path
        assert file.exists(), path
        assert not name or name in functions_of(file), f"{path} has no {name}"
