"""What a user names as MODEL: to a URI, with a check that takes seconds, before a worker spends longer to fail."""

from collections.abc import Sequence
from pathlib import Path

from fairlead.errors import UserError
from fairlead.local.containers import LOOPBACK
from fairlead_worker.config import WorkerConfig
from fairlead_worker.config.values import to_model_uri
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights import hub
from fairlead_worker.weights.hub import HubModel
from fairlead_worker.weights.uri import parse_uri, resolve

OWN_FLAGS = {"--model": "give MODEL", "--port": "give --port"}
"""Flags that `fairlead serve` gives the worker itself, with what to give instead."""
PROBED_HOSTS = ("0.0.0.0", "localhost", LOOPBACK)
"""Values of `--host` with which a worker answers on loopback over IPv4."""
WEIGHTS = "*.safetensors"


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
            _check_folder(uri)
        elif isinstance(source, HubModel):
            hub.check_exists(uri, source)
    except ModelLoadError as error:
        hint = "" if "://" in name or uri.startswith("file:") else f"; there is no folder {name} here either"
        raise ModelRefused(f"{name}: {error.cause}{hint}") from None
    return uri


def _check_folder(uri: str) -> None:
    folder = resolve(uri)
    if not any(folder.glob(WEIGHTS)):
        raise ModelLoadError(uri, f"no {WEIGHTS} in {folder}; convert the checkpoint to safetensors")


def worker_config(uri: str, port: int, flags: Sequence[str]) -> WorkerConfig:
    """Return the configuration that a worker with these flags will have. Ends the process with status 2 for a wrong flag, as it would.

    Raises UserError for a flag that `fairlead serve` gives itself.
    """
    for flag in flags:
        if instead := OWN_FLAGS.get(flag.partition("=")[0]):
            raise UserError(f"-- {flag}: {instead} before -- instead")
    config = WorkerConfig.from_command_line(["--model", uri, "--port", str(port), *flags])
    if given_host(flags) not in (None, *PROBED_HOSTS):
        raise UserError(f"-- --host {config.host}: give 0.0.0.0 for all addresses or {LOOPBACK}; readiness is asked on {LOOPBACK}")
    return config


def given_host(flags: Sequence[str]) -> str | None:
    """Return the last value of `--host` among worker flags; None if there is none."""
    found = None
    for flag, after in zip(flags, (*flags, "")[1:], strict=True):
        if flag == "--host" or flag.startswith("--host="):
            found = flag.partition("=")[2] if "=" in flag else after
    return found
