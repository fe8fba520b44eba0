"""An agent's program as its user has it: set up by the guide's example, in a home of its own, with the gateway as its only host."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, cycle
from pathlib import Path

from tests.clients.agents.gateway import TEXT, Exchange, Gateway
from tests.own_environment import OwnEnvironment
from tests.worker.api.process import WorkerProcess

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "guides" / "clients.md"
EXAMPLES: dict[str, str] = dict(re.findall(r"^### ([\w ]+)\n```\w+\n(.*?)^```", PAGE.read_text(), re.S | re.M))
"""The guide's example of each program."""
VERSIONS: dict[str, str] = dict(re.findall(r"^\| ([\w ]+) \| .* \| ([\d.]+) \|$", PAGE.read_text(), re.M))
FRAMEWORKS = OwnEnvironment("agents", HERE / "requirements.txt")
AIDER = OwnEnvironment("aider", HERE / "aider.txt")
MODELS = ("gemma", "gpt-5.5", "gpt-6-sol")
"""The worker's names. Codex knows the last two, and offers them other kinds of tools than a model that it does not know."""
QUIET = {
    "OTEL_SDK_DISABLED": "true",
    "DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "AIDER_CHECK_UPDATE": "false",
}


@dataclass(frozen=True)
class Program:
    """One program in its own home and working directory."""

    gateway: Gateway
    folder: Path
    """The working directory, within the home."""
    path: Path
    """The folder of its executables."""
    model: str = MODELS[0]

    def run(self, *command: str | Path, seconds: float = 280) -> str:
        """Return what a command writes; fail with all that is known if it fails."""
        url = self.gateway.url
        environment = {
            "PATH": f"{self.path}:{os.environ['PATH']}",
            "HOME": str(self.folder.parent),
            "LANG": "C.UTF-8",
            "BASE_URL": url,
            "MODEL": self.model,
            "HTTP_PROXY": url,
            "HTTPS_PROXY": url,
            "NO_PROXY": "127.0.0.1",
            **QUIET,
        }
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{self.failures()}"
        return done.stdout

    def failures(self) -> list[str]:
        """Describe each request that was refused or not completed."""
        refused = [f"{each.path} {each.status} {each.answer[:500]}" for each in self.gateway.exchanges if each.status >= 400]
        return refused + self.gateway.broken

    def answers(self) -> list[Exchange]:
        """Return the exchanges with a conversation. No request may have failed."""
        assert not self.failures()
        return [each for each in self.gateway.exchanges if each.items]


@contextmanager
def program(
    worker: WorkerProcess, folder: Path, path: Path, *patterns: str, needs_tools: bool = True, model: str = MODELS[0]
) -> Iterator[Program]:
    """Hold the answers to a program's questions to a sentence first, then to each of `patterns` in turn."""
    work = folder / "work"
    work.mkdir()
    with Gateway(worker.url, chain([TEXT], cycle(patterns)) if patterns else cycle([TEXT]), needs_tools=needs_tools) as gateway:
        try:
            yield Program(gateway, work, path, model)
        finally:
            (folder / "exchanges.json").write_text(json.dumps([asdict(each) for each in gateway.exchanges], indent=1))
    print(f"{len(gateway.exchanges)} requests; wanted to reach {sorted(gateway.elsewhere)}")
    print("warnings:", sorted({each.warning for each in gateway.exchanges if each.warning}))
