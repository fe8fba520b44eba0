"""The mock worker and the load client: compiled once into the cache, run on other cores than the routers."""

import hashlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tests.router.prompt_format import make_format

HERE = Path(__file__).with_name("c")
FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror")
LISTEN_SECONDS = 10.0
PROMPT = "A prompt of a few words, as people write them; nothing in it is ever computed."


class NoCompiler(Exception):
    """There is no C compiler. A mock in Python would be the bottleneck."""


@dataclass(frozen=True)
class Tools:
    """Paths of the two programs."""

    mock: Path
    load: Path


@dataclass(frozen=True)
class Scenario:
    """The client's requests and its number of connections."""

    name: str
    connections: int
    chunks: int = 0
    """Events of a stream; 0: one whole answer."""
    pace_us: int = 0
    """Microseconds between them; 0: as fast as the sockets accept them."""

    def body(self) -> bytes:
        prompt = f"{PROMPT} chunks={self.chunks}; pace={self.pace_us};"
        request = {"model": "bench", "prompt": prompt, "max_tokens": max(1, self.chunks)} | ({"stream": True} if self.chunks else {})
        return json.dumps(request).encode()


def build(cache: Path) -> Tools:
    """Compile both programs if needed. Raises NoCompiler."""
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        raise NoCompiler("no C compiler (cc, gcc or clang): install gcc; the mock worker and the load client are written in C")
    sources = [HERE / name for name in ("net.h", "mock.c", "load.c")]
    key = hashlib.sha256(b"\0".join([*(source.read_bytes() for source in sources), " ".join(FLAGS).encode()])).hexdigest()[:10]
    folder = cache / f"router-tools-{key}"
    tools = Tools(folder / "mock", folder / "load")
    for program in (tools.mock, tools.load):
        if not program.exists():
            folder.mkdir(parents=True, exist_ok=True)
            partial = program.with_suffix(".partial")
            subprocess.run([compiler, *FLAGS, str(HERE / f"{program.name}.c"), "-o", str(partial)], check=True)
            partial.rename(program)
    return tools


def on_cores(cores: Sequence[int], *command: str | Path) -> list[str]:
    """Return the command, bound to these cores."""
    return ["taskset", "-c", ",".join(map(str, cores)), *map(str, command)]


@contextmanager
def mock_worker(tools: Tools, port: int, cores: Sequence[int], scratch: Path) -> Iterator[None]:
    """Run the mock worker while the context lasts. It uses the tests' prompt format: one token per byte."""
    format = scratch / "prompt-format.json"
    format.write_bytes(msgspec.json.encode(make_format("bench")))
    process = subprocess.Popen(on_cores(cores, tools.mock, str(port), format))
    try:
        give_up = time.monotonic() + LISTEN_SECONDS
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the mock worker does not listen on port {port} (status {process.poll()})")
            time.sleep(0.01)
        yield
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def load(tools: Tools, port: int, scenario: Scenario, cores: Sequence[int], scratch: Path, seconds: float, warm: float) -> dict[str, Any]:
    """Return the figures that load.c prints. Raises CalledProcessError if the router cannot be reached."""
    body = scratch / f"{scenario.name}.json"
    body.write_bytes(scenario.body())
    command: list[str | Path] = [tools.load, str(port), str(scenario.connections), str(warm), str(seconds), body, "/v1/completions"]
    result = subprocess.run(on_cores(cores, *command), check=True, stdout=subprocess.PIPE, timeout=seconds + warm + 60)
    figures: dict[str, Any] = json.loads(result.stdout)
    return figures
