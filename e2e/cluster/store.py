"""Built images in the cache, as one OCI layout whose layers are uncompressed and shared between images."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from .paths import cache_root

_NAME = "org.opencontainers.image.ref.name"


class NotStored(RuntimeError):
    """The requested image has not been built."""


def layout() -> Path:
    return cache_root() / "oci"


def contains(reference: str) -> bool:
    return any(_name(entry) == reference for entry in _entries())


def write_archive(reference: str, present: set[str], out: IO[bytes]) -> int:
    """Write an OCI archive of `reference` without the layers whose digests are in `present`. Return the bytes of the written layers."""
    entry = _entry(reference)
    manifest = _manifest(entry)
    named = {**entry, "annotations": {"io.containerd.image.name": reference}}
    written = 0
    with tarfile.open(fileobj=out, mode="w|", bufsize=1 << 20) as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(archive, "index.json", json.dumps({"schemaVersion": 2, "manifests": [named]}).encode())
        for digest in (entry["digest"], manifest["config"]["digest"]):
            _add(archive, _member(digest), _blob(digest).read_bytes())
        for digest, size in {layer["digest"]: layer["size"] for layer in manifest["layers"]}.items():
            if digest not in present:
                archive.add(_blob(digest), _member(digest), recursive=False)
                written += size
    return written


def share_layers(reference: str, content_store: Path) -> None:
    """Replace our layers by hard links to containerd's copies, so that 5 GB of torch are on the disk once."""
    for layer in _manifest(_entry(reference))["layers"]:
        ours, theirs = _blob(layer["digest"]), content_store / _member(layer["digest"])
        if theirs.exists() and ours.stat().st_dev == theirs.stat().st_dev and not ours.samefile(theirs):
            linked = ours.with_suffix(".link")
            linked.unlink(missing_ok=True)
            linked.hardlink_to(theirs)
            linked.replace(ours)


def remove(references: Iterable[str]) -> None:
    """Remove images, and the blobs that no other image needs."""
    kept = [entry for entry in _entries() if _name(entry) not in set(references)]
    (layout() / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": kept}))
    wanted: set[str] = set()
    for entry in kept:
        manifest = _manifest(entry)
        wanted |= {entry["digest"], manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])}
    for blob in (layout() / "blobs" / "sha256").iterdir():
        if f"sha256:{blob.name}" not in wanted:
            blob.unlink()


def _entries() -> list[dict[str, Any]]:
    index = layout() / "index.json"
    return list(json.loads(index.read_text())["manifests"]) if index.exists() else []


def _entry(reference: str) -> dict[str, Any]:
    for entry in _entries():
        if _name(entry) == reference:
            return entry
    raise NotStored(f"{reference} is not in {layout()}: build it first (e2e.cluster.images.build)")


def _name(entry: dict[str, Any]) -> str:
    return str(entry.get("annotations", {}).get(_NAME, ""))


def _manifest(entry: dict[str, Any]) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(_blob(entry["digest"]).read_bytes())
    return manifest


def _member(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _blob(digest: str) -> Path:
    return layout() / _member(digest)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))
