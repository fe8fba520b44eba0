"""A model at the other end of hf:// and oci://: a stand-in of the hub and a real registry, on loopback."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from release.registry import installed_registry, run_registry
from tests.worker.weights.hub import Hub
from tests.worker.weights.images import EMPTY, RAW, TITLE, push


@contextmanager
def remote_model(scheme: str, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Offer the files of `folder`. Yields the model's URI and the environment of a worker that can read it."""
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if not file.name.startswith(".")}
    if scheme == "hf":
        with Hub(folder) as hub:
            yield "hf://tiny/model", {"HF_ENDPOINT": hub.url}
    else:
        if (program := installed_registry()) is None:
            pytest.skip("no registry on this machine: make registry")
        with run_registry(program) as address:
            push(f"http://{address}", "tiny", "1", [(RAW, content, {TITLE: name}) for name, content in files.items()], config=EMPTY)
            yield f"oci://{address}/tiny:1", {"DOCKER_CONFIG": str(folder.parent / "docker")}
