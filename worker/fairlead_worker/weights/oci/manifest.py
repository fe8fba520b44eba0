"""Which layers of an image or artifact hold files of the model. Pure."""

import fnmatch
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

IMAGE_CONFIGS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
PATHS = ("org.cncf.model.filepath", "org.cnai.model.filepath")
TITLE = "org.opencontainers.image.title"
UNPACK = "io.deis.oras.content.unpack"
MODELS = "models"
"""Folder of the model in KServe's images."""
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Layer:
    """A blob. `path` is the place of a `file`; archives carry their own paths."""

    digest: str
    size: int
    kind: Literal["file", "tar", "tar+gzip"]
    path: str = ""


def platform_digest(index: Mapping[str, Any]) -> str | None:
    """Return the digest of this machine's manifest in an image index, or of the only one; None if there is none. Raises ValueError."""
    wanted = _MACHINES.get(platform.machine(), platform.machine())
    found = [one for one in index["manifests"] if _platform(one).get("os") != "unknown"]  # unknown: attestations
    mine = [one for one in found if _platform(one).get("architecture") == wanted]
    chosen = mine or (found if len(found) == 1 else [])
    if not chosen:
        return None
    if not is_digest(digest := str(chosen[0]["digest"])):
        raise ValueError(f"manifest {digest!r} has no sha256 digest")
    return digest


def is_digest(text: str) -> bool:
    return re.fullmatch("sha256:[0-9a-f]{64}", text) is not None


def _platform(one: Mapping[str, Any]) -> Mapping[str, Any]:
    return one.get("platform") or {}


def model_layers(manifest: Mapping[str, Any], patterns: Sequence[str], folder: str) -> list[Layer]:
    """Return the layers to download, in order. Raises ValueError for one that cannot be read."""
    is_image = manifest.get("config", {}).get("mediaType") in IMAGE_CONFIGS
    return [layer for one in manifest["layers"] if (layer := _layer(one, is_image, patterns, folder)) is not None]


def wanted_path(name: str, patterns: Sequence[str], folder: str) -> str | None:
    """Return the relative path of a file that the model needs, else None. Raises ValueError for a path that leaves the image."""
    path = PurePosixPath(name.lstrip("/"))
    if ".." in path.parts or "\0" in name:
        raise ValueError(f"it has a file {name!r}, whose path leaves the image: do not trust it")
    if not any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns):
        return None
    inside = path.is_relative_to(folder) if folder else len(path.parts) == 1 or not is_system(path)
    return str(path) if inside else None


def is_system(path: PurePosixPath) -> bool:
    """Return whether a path below the root belongs to the base image of a model image."""
    return path.parts[0] in ("bin", "boot", "dev", "etc", "home", "lib", "lib64", "opt", "proc", "root", "run", "sbin", "sys", "usr", "var")


def _layer(one: Mapping[str, Any], is_image: bool, patterns: Sequence[str], folder: str) -> Layer | None:
    media, notes = str(one["mediaType"]), one.get("annotations") or {}
    digest, size = str(one["digest"]), int(one["size"])
    if not is_digest(digest) or size < 0:
        raise ValueError(f"layer {digest!r} has no sha256 digest")
    named = next((notes[key] for key in PATHS if key in notes), None)
    title = notes.get(TITLE)
    # `oras push` gives plain files the media type of a tar. Only its mark for folders says that a titled layer is an archive.
    archive = ".tar" in media and (is_image or named is not None or title is None or notes.get(UNPACK) == "true")
    if archive:
        if "zstd" in media:
            raise ValueError(f"layer {digest} is compressed with zstd: push it with gzip or uncompressed")
        return Layer(digest, size, "tar+gzip" if "gzip" in media else "tar")
    path = wanted_path(str(named or title or ""), patterns, folder)
    return Layer(digest, size, "file", path) if path else None
