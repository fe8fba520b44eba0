"""The command line of each router in front of one worker. All of them use round robin unless the row names another policy."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.other_servers.environments import Environment
from bench.other_servers.process import free_port


@dataclass(frozen=True)
class Router:
    """A row of the table."""

    name: str
    environment: str | None
    """Name of its recipe; None: this checkout."""
    command: Callable[[Environment, int, int], list[str]]
    """Returns the command for (environment, own port, worker's port)."""


def fairlead(*flags: str) -> Callable[[Environment, int, int], list[str]]:
    def command(environment: Environment, port: int, worker: int) -> list[str]:
        listen = ["--host", "127.0.0.1", "--port", str(port), "--drain-grace", "0", "--drain-timeout", "1"]
        return [str(environment.tool("fairlead-router")), *listen, "--workers", f"static://127.0.0.1:{worker}", *flags]

    return command


def sglang(policy: str) -> Callable[[Environment, int, int], list[str]]:
    def command(environment: Environment, port: int, worker: int) -> list[str]:
        listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        start = [str(environment.python), "-m", "sglang_router.launch_router"]
        return [*start, *listen, "--worker-urls", f"http://127.0.0.1:{worker}", "--policy", policy]

    return command


def vllm(environment: Environment, port: int, worker: int) -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return [str(environment.tool("vllm-router")), *listen, "--worker-urls", f"http://127.0.0.1:{worker}", "--policy", "round_robin"]


ROUTERS = {
    router.name: router
    for router in (
        Router("fairlead", None, fairlead("--policy", "RoundRobin")),
        Router("fairlead-prefix", None, fairlead("--policy", "PrefixAware")),  # tokenizes and hashes every prompt
        Router("sglang-router", "sglang-router", sglang("round_robin")),
        Router("sglang-cache", "sglang-router", sglang("cache_aware")),  # its default
        Router("vllm-router", "vllm-router", vllm),
    )
}


def own() -> Environment:
    return Environment(Path(sys.executable).parent.parent)


def of_checkout(checkout: Path) -> Environment:
    return Environment(checkout / ".venv")
