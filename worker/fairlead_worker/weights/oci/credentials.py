"""Credentials of a registry, from the files that `docker login`, `podman login` and `oras login` write."""

import base64
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from fairlead_worker.weights.oci.reference import DOCKER_HUB

HELPER_SECONDS = 30


def read_credentials(registry: str) -> tuple[str, str] | None:
    """Return user and password for a registry; None if there are none. A file or helper that cannot be read counts as none."""
    found = (_read_file(file, registry) for file in _files())
    return next((credentials for credentials in found if credentials), None)


def _files() -> Iterator[Path]:
    """Yield the files that a registry may be in, the first wins. The last two are podman's (containers-auth.json(5))."""
    if given := os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(given)
    yield Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser() / "config.json"
    yield Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}") / "containers" / "auth.json"
    yield Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "containers" / "auth.json"


def _read_file(file: Path, registry: str) -> tuple[str, str] | None:
    names = (registry, f"https://{registry}", *(("https://index.docker.io/v1/",) if registry == DOCKER_HUB else ()))
    try:
        config = json.loads(file.read_bytes())
        for name in names:
            helper = config.get("credHelpers", {}).get(name) or config.get("credsStore")
            if helper and (found := _ask_helper(helper, name)):
                return found
            if encoded := config.get("auths", {}).get(name, {}).get("auth"):
                user, _, password = base64.b64decode(encoded).decode().partition(":")
                return user, password
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return None


def _ask_helper(helper: str, registry: str) -> tuple[str, str] | None:
    """Ask `docker-credential-HELPER`. Identity tokens (user `<token>`) are not supported."""
    if not re.fullmatch(r"[\w-]+", helper):
        return None
    command = [f"docker-credential-{helper}", "get"]
    try:
        done = subprocess.run(command, input=registry.encode(), capture_output=True, timeout=HELPER_SECONDS, check=True)
        answer = json.loads(done.stdout)
        return None if answer["Username"] == "<token>" else (answer["Username"], answer["Secret"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return None
