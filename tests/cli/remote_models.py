"""A model at the other end of hf://, s3:// and oci://: a stand-in of the hub, a real S3 server and a real registry, all on loopback."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from release.registry import installed_registry, run_registry
from tests.servers import s3_server
from tests.worker.weights.hub import Hub
from tests.worker.weights.images import EMPTY, RAW, TITLE, push


@contextmanager
def remote_model(scheme: str, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Offer the files of `folder`. Yields the model's URI and the environment of a worker that can read it."""
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if not file.name.startswith(".")}
    if scheme == "hf":
        with Hub(folder) as hub:
            yield "hf://tiny/model", {"HF_ENDPOINT": hub.url}
    elif scheme == "s3":
        if problem := s3_server.install():
            pytest.skip(f"no S3 server: {problem}")
        with s3_server.S3Server() as server:
            server.make("models")
            for name, content in files.items():
                server.put("models", f"tiny/{name}", content)
            keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
            yield "s3://models/tiny", {**keys, "AWS_ENDPOINT_URL": server.url}
    else:
        if (program := installed_registry()) is None:
            pytest.skip("no registry on this machine: make registry")
        with run_registry(program) as address:
            push(f"http://{address}", "tiny", "1", [(RAW, content, {TITLE: name}) for name, content in files.items()], config=EMPTY)
            yield f"oci://{address}/tiny:1", {"DOCKER_CONFIG": str(folder.parent / "docker")}
