"""vLLM and SGLang on this machine: `fairlead-agent` starts the engine of a pod with ports of its own."""

import importlib.util
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairlead.errors import UserError
from fairlead.local.containers import LOOPBACK, PodIdentity, environment, expand

ENGINE = "engine"
"""Name of the engine's container, a sidecar of the agent's."""
_PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")
_PATH = re.compile(r"(?:^|(?<==))/[^=]*$")
INSTALL = {
    "vllm": "install it in this environment (`pip install vllm`, on a CPU as vLLM's documentation says), or put its `vllm` on the PATH",
    "sglang": "install it in this environment as SGLang's documentation says",
}
"""What to do where an engine is missing, by runtime."""


@dataclass(frozen=True)
class EnginePorts:
    """Ports of one engine on the loopback."""

    http: int
    events: int
    replay: int

    @classmethod
    def choose(cls, free_port: Callable[[set[int]], int], taken: set[int]) -> "EnginePorts":
        """Return free ports that are not in `taken`."""
        chosen: list[int] = []
        for _ in range(3):
            chosen.append(free_port(taken | set(chosen)))
        return cls(*chosen)

    @property
    def agent_flags(self) -> list[str]:
        """The agent's flags for these ports."""
        host = f"tcp://{LOOPBACK}"
        http = f"http://{LOOPBACK}:{self.http}"
        return ["--engine-url", http, "--kv-events", f"{host}:{self.events}", "--kv-replay", f"{host}:{self.replay}"]


def engine_container(template: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the engine's container of a pod; None where the worker is Fairlead's own."""
    return next((one for one in template["spec"].get("initContainers", ()) if one["name"] == ENGINE), None)


def engine_command(
    engine: Mapping[str, Any],
    identity: PodIdentity,
    ports: EnginePorts,
    host_env: Mapping[str, str],
    mounts: set[str],
    find_path: Callable[[str], str],
) -> tuple[list[str], dict[str, str]]:
    """Return the engine's command on this machine, and its own variables. Raises UserError for an engine that is not installed.

    `mounts`: paths that exist only in the container; variables that point there keep this machine's values.
    """
    env = environment([entry for entry in engine.get("env", ()) if entry.get("value") not in mounts], identity, host_env)
    command = find_engine([expand(word, env) for word in engine["command"]])
    local = [_with_ports(expand(arg, env), ports) for arg in engine.get("args", ())]
    return [*command, *(_PATH.sub(lambda match: find_path(match[0]), arg) for arg in local)], env


def find_engine(command: Sequence[str]) -> list[str]:
    """Return the command of an engine for this machine. Raises UserError, which says what to install."""
    module = command[2].partition(".")[0] if list(command[1:2]) == ["-m"] else ""
    if module:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"{module} is not installed: {INSTALL.get(module, 'install it')}; or use spec.engine.runtime Fairlead")
        return [sys.executable, *command[1:]]
    program = shutil.which(command[0])
    if program is None:
        raise UserError(f"{command[0]} is not installed: {INSTALL.get(command[0], 'install it')}; or use spec.engine.runtime Fairlead")
    return [program, *command[1:]]


def _with_ports(arg: str, ports: EnginePorts) -> str:
    """Return an argument of the engine with the local ports in place of the pod's."""
    if arg.startswith("--port="):
        return f"--port={ports.http}"
    if arg.startswith("--kv-events-config="):
        found = iter((ports.events, ports.replay))
        return _PORT.sub(lambda match: str(next(found, match[0])), arg)
    return arg
