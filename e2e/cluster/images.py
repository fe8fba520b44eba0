"""Builds images with buildah, without a registry, and hands them to containerd; nothing is built, written or imported twice.

`build` keys an image by its content: `localhost/NAME:KEY`. Each image lies as an OCI layout in the cache, its layers uncompressed and shared
between images; `missing_blobs_archive` streams to a containerd only those that it does not have yet. A layer with torch (5 GB) is thus
built and imported once on a machine.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from .paths import CHECKOUT, cache_root, content_key, locked

BASE_SUITE = "bookworm"
BASE_PACKAGES = "ca-certificates,curl,procps,python3,python3-venv,python-is-python3,redis-server"
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "*.egg-info", "build", "dist")
_EPOCH = 1_600_000_000


class ImageFailed(RuntimeError):
    """An image could not be built or imported; the message carries the last lines of the tool that failed."""


def base() -> str:
    """The image that the product's Containerfiles build upon: Debian with Python 3.11, redis-server and curl, no compiler, no pip settings."""
    containerfile = "FROM scratch\nADD rootfs.tar /\nCMD [\"python3\"]\n"
    key = content_key("fairlead-base", BASE_SUITE, BASE_PACKAGES, containerfile)
    rootfs = cache_root() / "base" / f"{key}.tar"
    with locked(cache_root() / "locks" / "base"):
        if not rootfs.exists():
            partial = rootfs.with_suffix(".partial.tar")
            command = ["mmdebstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "--dpkgopt=path-exclude=/usr/share/doc/*"]
            _run([*command, BASE_SUITE, str(partial)], f"Debian {BASE_SUITE} base")
            partial.replace(rootfs)
    return _build("fairlead-base", key, containerfile, {"rootfs.tar": rootfs})


def pause(program: Path) -> str:
    """The pod sandbox's image: nothing but the pause program."""
    containerfile = 'FROM scratch\nCOPY pause /pause\nUSER 65535:65535\nENTRYPOINT ["/pause"]\n'
    return _build("fairlead-pause", content_key(containerfile, program), containerfile, {"pause": program})


def build(name: str, containerfile: Path, sources: Iterable[str], checkout: Path = CHECKOUT, base_image: str | None = None) -> str:
    """Reference `localhost/NAME:KEY` of the image that `containerfile` makes of `sources` (paths inside `checkout`); free when nothing changed."""
    base_image = base_image or base()
    files = {source: checkout / source for source in sources}
    contents: list[str | bytes | Path] = [name, base_image, containerfile]
    for source, path in sorted(files.items()):
        for file in _walk(path):
            contents += [f"{source}/{file.relative_to(path)}", file]
    return _build(name, content_key(*contents), containerfile.read_text(), files, base_image)


def stored(reference: str) -> dict[str, Any] | None:
    """The descriptor of an image in the cache's OCI layout, or None."""
    index = _layout() / "index.json"
    manifests = json.loads(index.read_text())["manifests"] if index.exists() else []
    named = [entry for entry in manifests if entry.get("annotations", {}).get("org.opencontainers.image.ref.name") == reference]
    return named[0] if named else None


def write_archive(reference: str, present: set[str], out: IO[bytes]) -> int:
    """Writes an OCI archive of `reference` to `out`, leaving out the layers whose digests are in `present`; returns the bytes of layers written."""
    descriptor = stored(reference)
    if descriptor is None:
        raise ImageFailed(f"{reference} is not in {_layout()}: build it first (e2e.cluster.images.build)")
    named = {**descriptor, "annotations": {"io.containerd.image.name": reference}}
    manifest = json.loads(_blob(descriptor["digest"]).read_bytes())
    written = 0
    with tarfile.open(fileobj=out, mode="w|", bufsize=1 << 20, copybufsize=1 << 20) as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(archive, "index.json", json.dumps({"schemaVersion": 2, "manifests": [named]}).encode())
        for digest in dict.fromkeys([descriptor["digest"], manifest["config"]["digest"]]):
            _add(archive, f"blobs/sha256/{digest[7:]}", _blob(digest).read_bytes())
        for layer in {layer["digest"]: layer for layer in manifest["layers"]}.values():
            if layer["digest"] not in present:
                archive.add(_blob(layer["digest"]), f"blobs/sha256/{layer['digest'][7:]}", recursive=False)
                written += layer["size"]
    return written


def share_layers(reference: str, content_store: Path) -> None:
    """Makes the cache's layers hard links of containerd's own copies, so that 5 GB of torch lie on the disk once, not twice."""
    descriptor = stored(reference)
    if descriptor is None:
        return
    for layer in json.loads(_blob(descriptor["digest"]).read_bytes())["layers"]:
        ours, theirs = _blob(layer["digest"]), content_store / "blobs" / "sha256" / layer["digest"][7:]
        if theirs.exists() and ours.stat().st_dev == theirs.stat().st_dev and not ours.samefile(theirs):
            linked = ours.with_suffix(".link")
            linked.unlink(missing_ok=True)
            linked.hardlink_to(theirs)
            linked.replace(ours)


def _build(name: str, key: str, containerfile: str, files: dict[str, Path], base_image: str | None = None) -> str:
    reference = f"localhost/{name}:{key}"
    with locked(cache_root() / "locks" / "images"):
        if stored(reference) is not None:
            return reference
        with tempfile.TemporaryDirectory(prefix="fairlead-image-") as folder:
            context = Path(folder)
            for target, source in files.items():
                _stage(source, context / target)
            (context / "Containerfile").write_text(containerfile)
            arguments = [f"--build-arg=BASE={base_image}"] if base_image else []
            _run([*_buildah(), "bud", "--layers", *_build_flags(), *arguments, "-t", reference, str(context)], name)
        # Not `buildah push`, which compresses for this kind of target: minutes for torch, and again at each change of the code above it.
        stored_at = f"containers-storage:[overlay@{_storage() / 'storage'}+{_storage() / 'run'}]{reference}"
        copy = ["skopeo", "--insecure-policy", "copy", "--quiet", "--dest-oci-accept-uncompressed-layers", stored_at]
        _run([*copy, f"oci:{_layout()}:{reference}"], f"{name} (layers)")
        _forget_older(name, reference)
    return reference


def _build_flags() -> list[str]:
    """What a build step needs of this machine (mirror, certificates); mounted while it runs, never written into the image."""
    settings = cache_root() / "pip.conf"
    bundle = next((os.environ[name] for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE") if os.environ.get(name)), "")
    index = os.environ.get("PIP_INDEX_URL", "")
    lines = ["[global]", "timeout = 180"] + [f"cert = {bundle}"] * bool(bundle) + [f"index-url = {index}"] * bool(index)
    settings.write_text("\n".join(lines) + "\n")
    mounts = {"/etc/ssl/certs": "/etc/ssl/certs", "/etc/apt": "/etc/apt", str(settings): "/etc/pip.conf"}
    if bundle and not bundle.startswith("/etc/ssl/certs/"):
        mounts[bundle] = bundle
    return ["--isolation=chroot", "--network=host"] + [f"--volume={src}:{dst}:ro" for src, dst in mounts.items() if Path(src).exists()]


def _forget_older(name: str, keep: str) -> None:
    """Of images that a checkout's code decides, only the newest stays tagged: the shared layers below it are what is worth keeping."""
    listed = subprocess.run([*_buildah(), "images", "--format", "{{.Name}}:{{.Tag}}"], capture_output=True, text=True).stdout.split()
    older = [reference for reference in listed if reference.startswith(f"localhost/{name}:") and reference != keep]
    if older:
        subprocess.run([*_buildah(), "rmi", *older], capture_output=True)
    index_path = _layout() / "index.json"
    index = json.loads(index_path.read_text())
    index["manifests"] = [entry for entry in index["manifests"] if entry.get("annotations", {}).get("org.opencontainers.image.ref.name") not in older]
    index_path.write_text(json.dumps(index))
    wanted: set[str] = set()
    for entry in index["manifests"]:
        manifest = json.loads(_blob(entry["digest"]).read_bytes())
        wanted |= {entry["digest"], manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])}
    for blob in (_layout() / "blobs" / "sha256").iterdir():
        if f"sha256:{blob.name}" not in wanted:
            blob.unlink()


def _layout() -> Path:
    return cache_root() / "oci"


def _blob(digest: str) -> Path:
    return _layout() / "blobs" / "sha256" / digest.removeprefix("sha256:")


def _storage() -> Path:
    return cache_root() / "buildah"


def _buildah() -> list[str]:
    return ["buildah", "--storage-driver=overlay", f"--root={_storage() / 'storage'}", f"--runroot={_storage() / 'run'}"]


def _walk(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, directories, names in os.walk(path):
        ignored = _IGNORED(folder, [*directories, *names])
        directories[:] = sorted(set(directories) - ignored)
        yield from (Path(folder) / name for name in sorted(set(names) - ignored))


def _stage(source: Path, target: Path) -> None:
    """Copies into the build context with fixed times, for buildah's cache looks at them."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        if source.stat().st_size > 1 << 20:
            target.hardlink_to(source) if source.stat().st_dev == target.parent.stat().st_dev else shutil.copy2(source, target)
            return
        shutil.copy2(source, target)
        os.utime(target, (_EPOCH, _EPOCH))
        return
    shutil.copytree(source, target, ignore=_IGNORED)
    for path in [target, *target.rglob("*")]:
        os.utime(path, (_EPOCH, _EPOCH))


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def _run(command: list[str], what: str) -> None:
    print(f"[image] {what} ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if result.returncode != 0:
        tail = "\n".join(result.stdout.splitlines()[-25:])
        raise ImageFailed(f"{what}: `{' '.join(command[:3])} ...` failed with code {result.returncode}:\n{tail}")
    print(f"[image] {what} done in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


WORKER_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "requirements/worker.txt", "index", "worker", "router", "operator", "cli")

if __name__ == "__main__":
    print(build("fairlead-worker", CHECKOUT / "images" / "Containerfile.worker", WORKER_SOURCES))
