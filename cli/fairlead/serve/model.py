"""What a user names as MODEL: to a URI, with a check that takes seconds, before a worker spends longer to fail."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from fairlead.errors import UserError
from fairlead.local.containers import LOOPBACK
from fairlead.local.engine import find_engine
from fairlead.serve.options import ServeOptions
from fairlead_worker.config import WorkerConfig
from fairlead_worker.config.values import to_model_uri
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights import hub
from fairlead_worker.weights.digest import WEIGHTS
from fairlead_worker.weights.hub import HubModel
from fairlead_worker.weights.uri import parse_uri, resolve

OWN_FLAGS = ("--port", "--replicas", "--runtime", "--stop-grace")
ENGINE_COMMANDS = {"vllm": ("vllm", "serve"), "sglang": ("python3", "-m", "sglang.launch_server")}
_SET = "the router and the agent in front of it set it"
REFUSED_ENGINE_FLAGS = {
    **dict.fromkeys(("host", "served-model-name", "model", "model-path", "kv-events-config", "api-key"), _SET),
    "disable-log-stats": "the agent reads the load from the engine's metrics",
    **dict.fromkeys(("data-parallel-size", "dp", "dp-size"), "the engine behind an agent has one KV cache; give --replicas instead"),
}
"""Why a flag of vLLM or SGLang is refused."""
PROBED_HOSTS = ("0.0.0.0", "localhost", LOOPBACK)
"""Values of `--host` with which a worker answers on loopback over IPv4."""


class ModelRefused(Exception):
    """The model cannot be served. The message names it, the cause and what to do."""


def find_model(name: str) -> str:
    """Return the model's URI. Raises ModelRefused for a folder without a model and for a repository that the hub does not have.

    A bucket or registry is not asked: the worker reports its errors within the time that the question takes.
    """
    try:
        uri = to_model_uri(name)
    except ValueError as error:
        raise ModelRefused(f"{name} {error}") from None
    try:
        source = parse_uri(uri)
        if isinstance(source, Path):
            _check_folder(uri, source)
        elif isinstance(source, HubModel):
            hub.check_exists(uri, source)
    except ModelLoadError as error:
        hint = "" if "://" in name or uri.startswith("file:") else f"; there is no folder {name} here either"
        raise ModelRefused(f"{name}: {error.cause}{hint}") from None
    return uri


def _check_folder(uri: str, path: Path) -> None:
    if not path.exists():
        model = "give a folder with config.json and *.safetensors, a GGUF file, or ORG/NAME of the Hugging Face hub"
        raise ModelLoadError(uri, f"there is no {path}; {model}, or make a random model: fairlead make-model {shlex.quote(str(path))}")
    folder = resolve(uri)
    if not any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        raise ModelLoadError(uri, f"no {' and no '.join(WEIGHTS)} in {folder}; convert the checkpoint to safetensors")


@dataclass(frozen=True)
class Served:
    """What the API serves. `name`: of the model. `key_file`: with the API keys; empty: none. `model_cache`: folder of downloaded models."""

    name: str
    key_file: str
    model_cache: str


def find_served(options: ServeOptions, uri: str) -> Served:
    """Return what a run serves. Ends the process with status 2 for a wrong flag of the worker; raises UserError for other wrong ones."""
    if options.runtime == "fairlead":
        config = worker_config(uri, options.port, options.flags or ())
        return Served(config.names[0], config.api_key_file, config.model_cache)
    _check_engine(options, uri)
    config = WorkerConfig.from_command_line(["--model", uri])
    return Served(config.names[0], "", config.model_cache)


def _check_engine(options: ServeOptions, uri: str) -> None:
    """Raise UserError for what vLLM and SGLang cannot serve here."""
    find_engine(ENGINE_COMMANDS[options.runtime])
    if not uri.startswith(("file://", "hf://")):
        raise UserError(f"--runtime {options.runtime}: {uri} is neither a folder nor a model of the hub; download it first")
    if uri.partition("@")[0].endswith(".gguf"):
        raise UserError(f"--runtime {options.runtime}: {uri} is a GGUF file, which only Fairlead's own engine serves; leave out --runtime")
    for flag in (one.partition("=")[0] for one in options.flags or ()):
        name = flag.lstrip("-").partition(".")[0].replace("_", "-")  # vLLM reads --api_key and --kv-events-config.endpoint too
        if flag.startswith("-") and name in REFUSED_ENGINE_FLAGS:
            raise UserError(f"{flag}: not with --runtime {options.runtime}, because {REFUSED_ENGINE_FLAGS[name]}")
        if flag in OWN_FLAGS:
            raise UserError(f"{flag}: give it before -- instead")


def worker_config(uri: str, port: int, flags: Sequence[str]) -> WorkerConfig:
    """Return the configuration that a worker with these flags will have. Ends the process with status 2 for a wrong flag, as it would.

    Raises UserError for a flag of `fairlead serve` itself, and for one that resembles it.
    """
    if flags and not flags[0].startswith("-"):
        raise UserError(f"{flags[0]}: one command serves one MODEL, and flags begin with --")
    for flag in (one.partition("=")[0] for one in flags):
        if re.match(r"-[A-Za-z]", flag):
            raise UserError(f"{flag} is not a flag; `fairlead-worker --help` lists the worker's flags")
        if flag == "--model":
            raise UserError(f"{flag}: give the model as the first argument instead")
        if flag in OWN_FLAGS:
            raise UserError(f"{flag}: give it before -- instead")
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if flag.startswith("--") and name not in WorkerConfig.model_fields and (meant := get_close_matches(flag, OWN_FLAGS, 1, 0.8)):
            raise UserError(f"{flag} is not a flag; did you mean {meant[0]}?")
    config = WorkerConfig.from_command_line(["--model", uri, "--port", str(port), *flags])
    if given_host(flags) not in (None, *PROBED_HOSTS):
        raise UserError(f"--host {config.host}: give 0.0.0.0 for all addresses or {LOOPBACK}; readiness is asked on {LOOPBACK}")
    return config


def given_host(flags: Sequence[str]) -> str | None:
    """Return the last value of `--host` among worker flags; None if there is none."""
    found = None
    for flag, after in zip(flags, (*flags, "")[1:], strict=True):
        if flag == "--host" or flag.startswith("--host="):
            found = flag.partition("=")[2] if "=" in flag else after
    return found
