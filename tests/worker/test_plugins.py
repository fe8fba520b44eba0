"""A parser or a model of another package is used once that package is installed; one that cannot be used is refused by name."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.worker.api.process import WorkerProcess

from fairlead.random_model.build import make_model
from fairlead_worker.model.adapters import register_adapter
from fairlead_worker.parsing.registry import reasoning_plugins, tool_call_plugins
from fairlead_worker.plugins import PluginError

PARSERS = """
from fairlead_worker.parsing.json_calls import JsonFormat
from fairlead_worker.parsing.reasoning import ReasoningFormat
from fairlead_worker.parsing.registry import ReasoningParser, ToolCallParser

HEAD = r'\\s*(?P<name>\\w{1,64})\\s*(?P<open>\\{)'
calls = ToolCallParser(JsonFormat(("<acme:call>",), HEAD, r"\\s*(?P<close></acme:call>)"), signs=("<acme:call>",))
thoughts = ReasoningParser(ReasoningFormat("<acme:think>", "</acme:think>"), signs=("<acme:think>",))
"""
MODEL = """
from transformers import Qwen3Config, Qwen3ForCausalLM

class AcmeConfig(Qwen3Config):
    model_type = "acme"

class AcmeForCausalLM(Qwen3ForCausalLM):
    config_class = AcmeConfig
"""
ENTRY_POINTS = """
[fairlead.tool_call_parsers]
acme = acme_parsers:calls
[fairlead.reasoning_parsers]
acme = acme_parsers:thoughts
[fairlead.model_adapters]
acme = acme_model:AcmeForCausalLM
"""
CALL = '<acme:call>now {"zone": "UTC"}</acme:call>'


def install(folder: Path, name: str, entry_points: str, **modules: str) -> Path:
    """Install a package of these modules into a folder, as pip leaves it there, and return the folder."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker with the package on PYTHONPATH, and a model of the package's `model_type`."""
    folder = tmp_path_factory.mktemp("plugins")
    site = install(folder / "site", "acme-fairlead", ENTRY_POINTS, acme_parsers=PARSERS, acme_model=MODEL)
    model = make_model(folder / "model", "qwen3", vocab=1024, layers=1)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "acme", "architectures": ["AcmeForCausalLM"]}))
    (model / "chat_template.jinja").write_text("{{ tools }} as <acme:call>: {% for message in messages %}{{ message.content }}{% endfor %}")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    paths = [str(site), *(path for path in sys.path if path)]
    process = WorkerProcess(model, folder / "run", PYTHONPATH=":".join(paths))
    yield process.wait_ready()
    assert process.stop() == 0


def test_a_package_adds_a_model_and_a_format_of_tool_calls(worker: WorkerProcess) -> None:
    log = worker.log.read_text()
    assert "tool calls: acme (from the chat template)" in log
    assert "model_type acme: AcmeForCausalLM of package acme-fairlead 1.0" in log
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    answer = worker.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "When?"}],
        tools=tools,
        structured_outputs={"regex": CALL.replace("{", r"\{").replace("}", r"\}")},
        max_tokens=100,
    ).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": '{"zone": "UTC"}'}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget the plug-ins that were found before and during a test."""
    for plugins in (tool_call_plugins, reasoning_plugins):
        plugins.cache_clear()
    yield
    for plugins in (tool_call_plugins, reasoning_plugins):
        plugins.cache_clear()


def test_a_package_adds_a_format_of_reasoning(tmp_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from fairlead_worker.parsing.events import gather
    from fairlead_worker.parsing.families import ParserOptions, select_parsers

    monkeypatch.syspath_prepend(install(tmp_path, "acme-thoughts", ENTRY_POINTS, acme_parsers=PARSERS))
    parsers, _ = select_parsers("none", "auto", ["<acme:think> and <think>"])
    parser = parsers.create_parser(ParserOptions(), "")
    message = gather([*parser.feed("<acme:think>hm</acme:think>Yes"), *parser.finish("stop")[0]])
    assert (parsers.reasoning_parser, message.reasoning, message.text) == ("acme", "hm", "Yes")


@pytest.mark.parametrize(
    ("entry", "module", "problem"),
    [
        ("bad = bad_one:missing", "", "bad_one:missing cannot be imported: AttributeError: .* Reinstall or uninstall the package"),
        ("bad = bad_one:thing", "thing = {}", "it is a dict, and must be a fairlead_worker.parsing.registry.ToolCallParser"),
        ("bad = bad_one:thing", "from fairlead_worker.parsing.registry import ToolCallParser as T; thing = T(1)", "its format must have"),
        (
            "bad = bad_one:thing",
            "from fairlead_worker.parsing.registry import *; thing = ToolCallParser(CALLS['hermes'], signs='<x>')",
            "signs is '<x>': it must be a tuple of strings",
        ),
        ("hermes = bad_one:thing", "", "Fairlead has a parser with this name: give the entry point another name"),
    ],
)
def test_a_parser_that_cannot_be_used_is_refused_with_its_package(
    entry: str, module: str, problem: str, tmp_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = install(tmp_path, "bad-package", f"[fairlead.tool_call_parsers]\n{entry}\n", bad_one=module)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "bad_one", raising=False)
    with pytest.raises(
        PluginError, match=rf"plug-in of package bad-package 1.0 \(entry point '\w+' in fairlead.tool_call_parsers\): {problem}"
    ):
        tool_call_plugins()


def test_two_packages_with_one_name_are_refused(tmp_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first-package", "second-package"):
        site = install(tmp_path / name, name, "[fairlead.tool_call_parsers]\nsame = json:loads\n")
        monkeypatch.syspath_prepend(site)
    with pytest.raises(PluginError, match=r"package second-package 1.0 .*: package first-package 1.0 has the same name"):
        tool_call_plugins()


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("odd", "json:loads", "must be a subclass of transformers.PreTrainedModel"),
        ("odd", "transformers:LlamaForCausalLM", "has model_type 'llama': it must be the name of the entry point"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_with_its_package(
    name: str, value: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, "bad-model", f"[fairlead.model_adapters]\n{name} = {value}\n"))
    with pytest.raises(PluginError, match=rf"package bad-model 1.0 \(entry point 'odd' in fairlead.model_adapters\): .*{problem}"):
        register_adapter(name)
    assert not register_adapter("telepathy")


def test_a_worker_does_not_start_with_a_parser_that_cannot_be_used(tmp_path: Path) -> None:
    site = install(tmp_path, "bad-package", "[fairlead.tool_call_parsers]\nbad = nothing_like_this:thing\n")
    command = [sys.executable, "-m", "fairlead_worker.main", "--model", "file:///nowhere"]
    paths = ":".join([str(site), *(path for path in sys.path if path)])
    done = subprocess.run(command, env={"PYTHONPATH": paths, "PATH": "/usr/bin"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and done.stderr.count("package bad-package 1.0") == 1, done.stderr
