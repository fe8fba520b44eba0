"""Coding agents hold a session of ten turns with tools, unchanged; `make agents` runs these (minutes; a gigabyte of programs)."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tests.clients.agents.gateway import TEXT, Exchange, call
from tests.clients.agents.program import AIDER, EXAMPLES, HERE, VERSIONS, Program, program
from tests.worker.api.process import WorkerProcess

TURNS = 10
NOTES = "The harbour opens at noon."
PACKAGES = {"Codex CLI": "@openai/codex", "Claude Code": "@anthropic-ai/claude-code", "opencode": "opencode-ai"}
AGAIN = {
    "Codex CLI": ("codex exec --skip-git-repo-check", "codex exec --sandbox workspace-write --skip-git-repo-check resume --last"),
    "Claude Code": ("claude --print", "claude --continue --print"),
    "opencode": ("opencode run", "opencode run --continue"),
    "aider": ("aider", "aider --yes-always --restore-chat-history --file notes.txt"),
}
"""What a user types to go on, instead of the command of the first turn."""
SHELL = {"command": "cat notes.txt", "description": "Shows the notes"}
CALLS = {
    "Codex CLI": (call("exec_command", {"cmd": "cat notes.txt"}, {"cmd": "head -n 1 notes.txt"}),),
    "Claude Code": (call("Bash", SHELL), call("Read", {"file_path": "notes.txt"})),
    "opencode": (call("bash", SHELL), call("read", {"filePath": "notes.txt"})),
}
"""A program runs what the model says: these calls only read."""
SCRIPT = "const read = await tools.exec_command({cmd: 'cat notes.txt'}); text(read.output)"
PATCH = f"*** Begin Patch\n*** Update File: notes.txt\n@@\n-{NOTES}\n+It is closed.\n*** End Patch\n"
KINDS = {
    "gpt-5.5": (
        (call("apply_patch", {"input": PATCH}), ("custom_tool_call_output", "Success")),
        (call("tool_search", {"query": "notes"}), ("tool_search_output", "tools")),
    ),
    "gpt-6-sol": (
        (call("functions__exec", {"input": SCRIPT}), ("custom_tool_call_output", NOTES)),
        (call("collaboration__list_agents", {}), ("function_call_output", "/root")),
    ),
}
"""Calls of tools that are no plain functions, and what their results show: custom tools, the client's search, namespaces."""


@pytest.fixture(scope="session")
def programs() -> Path:
    """Install the programs of package.json from npm, once for each of its versions; return the folder of executables."""
    manifest = HERE / "package.json"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "fairlead" / "agents-npm" / sha256(manifest.read_bytes()).hexdigest()[:10]
    if not (folder / "made").exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(manifest, folder)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"], cwd=folder, check=True, timeout=600)
        (folder / "made").touch()
    return folder / "node_modules" / ".bin"


def hold_session(space: Program, name: str, turns: int = TURNS) -> None:
    """Hold a session: the guide's example, then turns in which the user goes on."""
    (space.folder / "notes.txt").write_text(f"{NOTES}\n")
    first, again = AGAIN[name]
    assert first in EXAMPLES[name]
    for turn in range(1, turns + 1):
        question = EXAMPLES[name] if turn == 1 else EXAMPLES[name].replace(first, again).replace("Say hello.", f"{turn}: read notes.txt.")
        said = space.run("sh", "-e", "-c", question)
        assert re.search(r"[A-Z][a-z]+( [a-z]+)+\.", said), said
        assert not re.search(r"\bERROR\b|Error: |\.\w+Error\b|Exception", said), said  # the model may write of errors, too, in a sentence


def results(exchange: Exchange) -> dict[str, str]:
    """Return the result of each call in the conversation of a request, by the call's id."""
    found: dict[str, Any] = {}
    for item in exchange.items:
        if item.get("role") == "tool":
            found[item["tool_call_id"]] = item["content"]
        elif item.get("type") == "function_call_output":
            found[item["call_id"]] = item["output"]
        elif item.get("role") == "user" and isinstance(item["content"], list):
            found |= {part["tool_use_id"]: part["content"] for part in item["content"] if part.get("type") == "tool_result"}
    return {key: json.dumps(result) for key, result in found.items()}


def calls(exchange: Exchange) -> Iterator[str]:
    """Yield the id of each call in the conversation of a request."""
    for item in exchange.items:
        yield from (each["id"] for each in item.get("tool_calls") or [])
        if item.get("type") == "function_call":
            yield item["call_id"]
        if item.get("role") == "assistant" and isinstance(item["content"], list):
            yield from (part["id"] for part in item["content"] if part.get("type") == "tool_use")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_coding_agent_holds_a_session(name: str, worker: WorkerProcess, programs: Path, tmp_path: Path) -> None:
    patterns = [pattern for each in CALLS[name] for pattern in (each, TEXT)]
    with program(worker, tmp_path, programs, *patterns) as space:
        hold_session(space, name)
        last = max(space.answers(), key=lambda exchange: len(exchange.request))
    told = results(last)
    assert set(told) == set(calls(last)) and len(told) == 5
    assert all(NOTES in result for result in told.values()), told


@pytest.mark.parametrize("model", KINDS)
def test_codex_calls_tools_of_each_kind(model: str, worker: WorkerProcess, programs: Path, tmp_path: Path) -> None:
    patterns, results = zip(*KINDS[model], strict=True)
    with program(worker, tmp_path, programs, *patterns, needs_tools=False, model=model) as space:
        hold_session(space, "Codex CLI", turns=1 + len(patterns))
        last = max(space.answers(), key=lambda exchange: len(exchange.request))
    told = [f"{item['type']} {json.dumps(item)}" for item in last.items if str(item.get("type")).endswith("_output")]
    assert len(told) == len(results)
    for (kind, text), output in zip(results, told, strict=True):
        assert output.startswith(f"{kind} ") and text in output, output


def test_aider_holds_a_session(worker: WorkerProcess, tmp_path: Path) -> None:
    """It calls no tools: an answer holds the file's new content as text."""
    problem = AIDER.install()
    assert not problem, f"the environment cannot be made: {problem}"
    edit = r"notes\.txt\n```\n(The harbour|A ship) [a-z ]{4,20}\n```"
    with program(worker, tmp_path, AIDER.folder / "bin", edit, TEXT, needs_tools=False) as space:
        hold_session(space, "aider")
        assert len(space.answers()) >= TURNS
        assert (space.folder / "notes.txt").read_text() != f"{NOTES}\n", "no edit was read"


def test_the_guide_names_the_pinned_versions() -> None:
    pins = json.loads((HERE / "package.json").read_text())["dependencies"]
    assert {name: VERSIONS[name] for name in PACKAGES} == {name: pins[package] for name, package in PACKAGES.items()}
    assert f"aider-chat=={VERSIONS['aider']} " in (HERE / "aider.txt").read_text()
