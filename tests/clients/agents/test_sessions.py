"""Agents' frameworks hold a session with tools, of two turns or (`make agents`) ten: no request is refused, no answer is unreadable."""

import os
import re
import sys
from itertools import cycle
from pathlib import Path

import pytest
from tests.clients.agents.gateway import TEXT, call
from tests.clients.agents.program import EXAMPLES, FRAMEWORKS, HERE, VERSIONS, program
from tests.worker.api.process import WorkerProcess

PACKAGES = {"Pydantic AI": "pydantic-ai-slim", "OpenAI Agents SDK": "openai-agents", "smolagents": "smolagents", "LangGraph": "langgraph"}
TURNS = os.environ.get("TURNS", "2")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_framework_holds_a_session(name: str, worker: WorkerProcess, tmp_path: Path) -> None:
    problem = FRAMEWORKS.install()
    assert not problem, f"the environment cannot be made: {problem}"
    with program(worker, tmp_path, FRAMEWORKS.folder / "bin") as space:
        (space.folder / "page.py").write_text(EXAMPLES[name])
        end = call("final_answer", {"answer": "It is warm."}) if name == "smolagents" else TEXT  # it ends each turn by a call
        space.gateway.patterns = cycle([call("report", {"city": "Oslo"}, {"city": "Rome"}), end])
        session = HERE / "sessions" / f"{PACKAGES[name].replace('-', '_').removesuffix('_slim')}_session.py"
        (space.folder / "session.py").write_text(session.read_text())
        (space.folder / "weather.py").write_text((session.parent / "weather.py").read_text())
        assert space.run("env", f"TURNS={TURNS}", "python", "session.py").strip(), (
            "the guide's example, which the session imports, got no answer"
        )
        assert len(space.answers()) >= int(TURNS)


def test_the_guide_names_the_pinned_versions() -> None:
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+) ", (HERE / "requirements.txt").read_text(), re.M))
    assert {name: VERSIONS[name] for name in PACKAGES} == {name: pins[package] for name, package in PACKAGES.items()}


if __name__ == "__main__":
    problem = FRAMEWORKS.install()
    sys.exit(f"the environment cannot be made: {problem}" if problem else None)
