"""Images and artifacts in a registry, pushed with plain HTTP so that tests can also push what no tool would."""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

IMAGE = "application/vnd.oci.image.config.v1+json"
EMPTY = "application/vnd.oci.empty.v1+json"
TAR = "application/vnd.oci.image.layer.v1.tar"
RAW = "application/vnd.cncf.model.weight.v1.raw"
TITLE = "org.opencontainers.image.title"


def tar(files: Mapping[str, bytes], mode: str = "w", links: Mapping[str, str] | None = None) -> bytes:
    """Return an archive of files and symbolic links."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as archive:  # type: ignore[call-overload]  # "w" or "w:gz"
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return made.getvalue()


def push(url: str, repository: str, tag: str, layers: Sequence[tuple[str, bytes, Mapping[str, str]]], config: str = IMAGE) -> str:
    """Push layers of (media type, content, annotations); return the manifest's digest."""
    described = [_blob(url, repository, media, content) | {"annotations": dict(notes)} for media, content, notes in layers]
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json"}
    return push_manifest(url, repository, tag, manifest | {"config": _blob(url, repository, config, b"{}"), "layers": described})


def push_manifest(url: str, repository: str, tag: str, manifest: Mapping[str, Any]) -> str:
    content = json.dumps(manifest).encode()
    headers = {"Content-Type": str(manifest["mediaType"])}
    httpx.put(f"{url}/v2/{repository}/manifests/{tag}", content=content, headers=headers, trust_env=False).raise_for_status()
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _blob(url: str, repository: str, media: str, content: bytes) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    started = httpx.post(f"{url}/v2/{repository}/blobs/uploads/", trust_env=False)
    httpx.put(
        httpx.URL(started.headers["Location"]).copy_merge_params({"digest": digest}), content=content, trust_env=False
    ).raise_for_status()
    return {"mediaType": media, "digest": digest, "size": len(content)}
