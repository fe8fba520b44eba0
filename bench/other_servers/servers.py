"""The servers and their command lines: the best settings for a machine with two cores and a bfloat16 model."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.other_servers.environments import Environment

if TYPE_CHECKING:  # it imports torch, which benchmarks of routers do not need
    from bench.other_servers.model import Model

NAME = "bench"
"""Name of the model in requests."""
KV_GIB = 2


@dataclass(frozen=True)
class Setting:
    """Where a server runs. `scratch` is the run's own folder."""

    environment: Environment
    model: "Model"
    scratch: Path
    port: int
    cores: tuple[int, ...]


@dataclass(frozen=True)
class Command:
    """The command line of a server."""

    arguments: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    headers: tuple[str, ...] = ()
    """Extra headers of the client's requests, as KEY=VALUE."""


class Server(ABC):
    """One row of the table."""

    name: str
    environment: str | None = None
    """Name of its recipe; None: this checkout."""

    def prepare(self, setting: Setting) -> None:  # noqa: B027  # most have nothing to do
        """Prepare the server once, before the measurements."""

    @abstractmethod
    def command(self, setting: Setting) -> Command:
        """Return its command line."""


class Fairlead(Server):
    """Fairlead's worker with its defaults."""

    name = "fairlead"

    def command(self, setting: Setting) -> Command:
        worker = [str(setting.environment.tool("fairlead-worker")), "--model", self._weights(setting).as_uri(), "--served-model-name", NAME]
        listen = ["--host", "127.0.0.1", "--port", str(setting.port)]
        flags = ["--dtype", "bfloat16", "--kv-cache-memory-bytes", str(KV_GIB << 30)]
        return Command([*worker, *listen, *flags], {"FAIRLEAD_TERMINATION_LOG": os.devnull})

    def _weights(self, setting: Setting) -> Path:
        return setting.model.folder


class FairleadGguf(Fairlead):
    """Fairlead's worker on the GGUF file that a row of llama.cpp serves too."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self._kind = name, kind

    def prepare(self, setting: Setting) -> None:
        self._weights(setting)

    def _weights(self, setting: Setting) -> Path:
        return setting.model.gguf(self._kind)


class Vllm(Server):
    """vLLM's CPU build with its defaults: one core computes, the other is left to the front end."""

    name = "vllm"
    environment = "vllm"

    def command(self, setting: Setting) -> Command:
        serve = [
            str(setting.environment.tool("vllm")),
            "serve",
            str(setting.model.folder),
            "--served-model-name",
            NAME,
            "--dtype",
            "bfloat16",
        ]
        listen = ["--host", "127.0.0.1", "--port", str(setting.port), "--max-model-len", "4096"]
        return Command([*serve, *listen], {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})


class VllmTuned(Vllm):
    """vLLM tuned as its CPU documentation recommends: every core computes, tcmalloc and Intel's OpenMP preloaded."""

    name = "vllm-tuned"

    def command(self, setting: Setting) -> Command:
        plain = super().command(setting)
        preload = (setting.environment.found("libtcmalloc_minimal.so.4"), setting.environment.found("libiomp5.so"))
        bind = f"{setting.cores[0]}-{setting.cores[-1]}"
        tuned = {"VLLM_CPU_OMP_THREADS_BIND": bind, "LD_PRELOAD": ":".join(map(str, preload))}
        return Command(plain.arguments, {**plain.variables, **tuned})


class Transformers(Server):
    """transformers' own server, continuous batching on; pages of 32 reuse prefixes that its default of 256 does not. Left alone it takes
    nearly all of the machine's memory for KV."""

    name = "transformers"
    environment = "transformers"

    def command(self, setting: Setting) -> Command:
        wrapper = str(Path(__file__).with_name("transformers_server.py"))
        model = str(setting.model.folder)
        serve = [str(setting.environment.python), wrapper, "serve", model, "--continuous-batching", "--cb-block-size", "32"]
        listen = ["--host", "127.0.0.1", "--port", str(setting.port), "--device", "cpu", "--dtype", "bfloat16"]
        pages = ["--cb-num-blocks", str((KV_GIB << 30) // (32 * setting.model.kv_bytes))]
        return Command([*serve, *pages, *listen], {"HF_HUB_OFFLINE": "1"})


class Llama(Server):
    """llama.cpp's server: eight slots, both cores. It closes connections that the client would keep."""

    environment = "llama"

    def __init__(self, name: str, kind: str) -> None:
        self.name, self._kind = name, kind

    def prepare(self, setting: Setting) -> None:
        setting.model.gguf(self._kind)

    def command(self, setting: Setting) -> Command:
        threads = str(len(setting.cores))
        serve = [str(setting.environment.tool("llama-server")), "-m", str(setting.model.gguf(self._kind)), "--alias", NAME, "--no-webui"]
        work = ["-c", str(8 * 512), "--parallel", "8", "--threads", threads, "--threads-batch", threads]
        return Command([*serve, *work, "--host", "127.0.0.1", "--port", str(setting.port)], headers=("Connection=close",))


SERVERS: dict[str, Server] = {
    server.name: server
    for server in (
        Fairlead(),
        Vllm(),
        VllmTuned(),
        Transformers(),
        Llama("llama.cpp", "BF16"),
        FairleadGguf("fairlead-gguf", "published"),
        Llama("llama.cpp-gguf", "published"),
        FairleadGguf("fairlead-q8_0", "Q8_0"),
        Llama("llama.cpp-q8_0", "Q8_0"),
    )
}
