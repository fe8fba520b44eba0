"""Builds images with buildah, without a registry or a daemon. The tag of an image is a digest of its inputs: nothing is built twice.

The base comes from Debian's packages. The layers are uncompressed in the cache (store.py), so that a change of code moves kilobytes,
although torch, 6 GB, is the layer below.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e import progress

from . import store
from .paths import CHECKOUT, cache_root, content_key, locked

BASE_SUITE = "bookworm"
BASE_PACKAGES = "ca-certificates,curl,procps,python3,python3-venv,python-is-python3,redis-server"
PACKAGES = ("common", "index", "worker", "router", "operator", "agent", "cli")
WORKER_SOURCES = (
    "pyproject.toml",
    "hatch_build.py",
    "README.md",
    "LICENSE",
    "requirements/worker.txt",
    "requirements/build.txt",
    *PACKAGES,
)
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "*.egg-info", "build", "dist", "libfairlead.*")
_EPOCH = 1_600_000_000


class ImageFailed(RuntimeError):
    """An image cannot be built or imported. The message contains the last lines of the tool that failed."""


def base(arch: str | None = None) -> str:
    """Build the base of the product's Containerfiles: Debian with Python 3.11, redis-server and curl. Return its reference.

    `arch`: Debian's name of another machine, such as arm64, whose programs run here by emulation.
    """
    containerfile = 'FROM scratch\nADD rootfs.tar /\nCMD ["python3"]\n'
    name = f"fairlead-base-{arch}" if arch else "fairlead-base"
    key = content_key(name, BASE_SUITE, BASE_PACKAGES, containerfile)
    rootfs = cache_root() / "base" / f"{key}.tar"
    with locked(cache_root() / "locks" / "base"):
        if not rootfs.exists():
            rootfs.parent.mkdir(parents=True, exist_ok=True)
            partial = rootfs.with_suffix(".partial.tar")
            command = ["mmdebstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "--dpkgopt=path-exclude=/usr/share/doc/*"]
            _run([*command, *_flag("--architectures", arch), BASE_SUITE, str(partial)], f"Debian {BASE_SUITE} base")
            partial.replace(rootfs)
    return _build(name, key, containerfile, {"rootfs.tar": rootfs}, arch=arch)


def pause(program: Path) -> str:
    """Build the pod sandbox's image, which has only the pause program. Return its reference."""
    containerfile = 'FROM scratch\nCOPY pause /pause\nUSER 65535:65535\nENTRYPOINT ["/pause"]\n'
    return _build("fairlead-pause", content_key(containerfile, program), containerfile, {"pause": program})


def build(
    name: str,
    containerfile: Path,
    sources: Iterable[str],
    checkout: Path = CHECKOUT,
    base_image: str | None = None,
    arch: str | None = None,
) -> str:
    """Build an image of `sources`, paths inside `checkout`, and return its reference. An unchanged image takes milliseconds.

    `base_image`: the Containerfile's BASE; None: `base()`. Only the newest image of each name is kept: a second version that a test needs
    at the same time needs another name.
    """
    base_image = base_image or base(arch)
    files = {source: checkout / source for source in sources}
    key = content_key(name, base_image, *contents(containerfile, files))
    return _build(name, key, containerfile.read_text(), files, base_image, arch)


def build_steps(
    name: str, containerfile: str, files: dict[str, Path], mounts: dict[Path, str], arguments: dict[str, str], env: str, stage: str
) -> None:
    """Run the steps of a Containerfile on `base()`. Their layers are kept for the next time, no node gets the image.

    `files`: the context. `mounts`: paths of this machine that the steps see. `arguments`: values of ARG. `env`: NAME=VALUE.
    `stage`: a stage that is kept too; other builds remove layers without a name.
    """
    flags = [f"--volume={source}:{target}:ro" for source, target in mounts.items()]
    flags += [f"--build-arg={name}={value}" for name, value in {"BASE": base(), **arguments}.items()]
    with locked(cache_root() / "locks" / "images"), build_context(containerfile, files) as context:
        for target in (stage, ""):
            named = [*_flag("--target", target), "-t", f"localhost/{name}:{target or 'last'}"]
            _run([*_buildah("bud"), "--layers", *_build_flags(), *flags, f"--env={env}", *named, str(context)], f"{name} {target}")


def run(reference: str, script: str, arch: str | None = None) -> None:
    """Run a shell script in a container of an image, as the image's user. Print what it prints; raise ImageFailed if it fails."""
    with locked(cache_root() / "locks" / "images"):  # a build removes all containers
        created = [*_buildah("from"), "--pull-never", *_flag("--arch", arch), reference]
        container = subprocess.run(created, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        try:
            status = subprocess.run([*_buildah("run"), "--isolation=chroot", container, "sh", "-ec", script]).returncode
        finally:
            subprocess.run([*_buildah("rm"), container], capture_output=True)
    if status != 0:
        raise ImageFailed(f"{reference}: the script failed with code {status}; its output is above")


def contents(containerfile: Path, files: dict[str, Path]) -> list[str | Path]:
    """Return everything that an image depends on, for content_key."""
    found: list[str | Path] = [containerfile]
    for source, path in sorted(files.items()):
        for file in _walk(path):
            found += [f"{source}/{file.relative_to(path)}", file]
    return found


@contextmanager
def build_context(containerfile: str, files: dict[str, Path]) -> Iterator[Path]:
    """Provide a folder with these files and a Containerfile. Their times are fixed, because the builders' caches compare them."""
    with tempfile.TemporaryDirectory(prefix="fairlead-image-") as folder:
        context = Path(folder)
        for target, source in files.items():
            _stage(source, context / target)
        (context / "Containerfile").write_text(containerfile)
        yield context


def _build(name: str, key: str, containerfile: str, files: dict[str, Path], base_image: str | None = None, arch: str | None = None) -> str:
    reference = f"localhost/{name}:{key}"
    with locked(cache_root() / "locks" / "images"):
        if store.contains(reference):
            return reference
        arguments = [*_flag("--build-arg=BASE", base_image), *_flag("--arch", arch)]
        with build_context(containerfile, files) as context:
            _run([*_buildah("bud"), "--layers", *_build_flags(), *arguments, "-t", reference, str(context)], name)
        # Not `buildah push`: it compresses for this kind of target, which takes minutes for torch at each change of the code above it.
        stored_at = f"containers-storage:[overlay@{_storage() / 'storage'}+{_storage() / 'run'}]{reference}"
        copy = ["skopeo", "--insecure-policy", "copy", "--quiet", "--dest-oci-accept-uncompressed-layers", stored_at]
        _run([*copy, f"oci:{store.layout()}:{reference}"], f"{name} (layers)")
        _remove_older(name, reference)
    return reference


def _build_flags() -> list[str]:
    """Return flags that mount this machine's mirrors and certificates while a build step runs. They are never part of the image."""
    settings = cache_root() / "pip.conf"
    bundle = next((os.environ[name] for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE") if os.environ.get(name)), "")
    index = os.environ.get("PIP_INDEX_URL", "")
    lines = ["[global]", "timeout = 180"] + [f"cert = {bundle}"] * bool(bundle) + [f"index-url = {index}"] * bool(index)
    settings.write_text("\n".join(lines) + "\n")
    mounts = {"/etc/ssl/certs": "/etc/ssl/certs", "/etc/apt": "/etc/apt", str(settings): "/etc/pip.conf"}
    if bundle and not bundle.startswith("/etc/ssl/certs/"):
        mounts[bundle] = bundle
    return ["--isolation=chroot", "--network=host"] + [f"--volume={src}:{dst}:ro" for src, dst in mounts.items() if Path(src).exists()]


def _remove_older(name: str, keep: str) -> None:
    """Remove the older images of this name. The newest one keeps the layers that it shares with them."""
    listed = subprocess.run([*_buildah("images"), "--format", "{{.Name}}:{{.Tag}}"], capture_output=True, text=True).stdout.split()
    older = [reference for reference in listed if reference.startswith(f"localhost/{name}:") and reference != keep]
    if older:
        subprocess.run([*_buildah("rmi"), *older], capture_output=True)
        store.remove(older)
    subprocess.run([*_buildah("rm"), "--all"], capture_output=True)  # a failed build leaves its container, which holds its layers
    subprocess.run([*_buildah("rmi"), "--prune"], capture_output=True)


def _storage() -> Path:
    return cache_root() / "buildah"


def _buildah(action: str) -> list[str]:
    return ["buildah", "--storage-driver=overlay", f"--root={_storage() / 'storage'}", f"--runroot={_storage() / 'run'}", action]


def _flag(name: str, value: str | None) -> list[str]:
    return [f"{name}={value}"] if value else []


def _walk(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise ImageFailed(f"{path} does not exist, and an image needs it")
    if path.is_file():
        yield path
    for folder, directories, names in os.walk(path):
        ignored = _IGNORED(folder, [*directories, *names])
        directories[:] = sorted(set(directories) - ignored)
        yield from (Path(folder) / name for name in sorted(set(names) - ignored))


def _stage(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=_IGNORED)
    else:
        shutil.copy2(source, target)
    for path in [target, *target.rglob("*")]:
        os.utime(path, (_EPOCH, _EPOCH))


def _run(command: list[str], what: str) -> None:
    with progress.step(f"build image {what}"):
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if result.returncode != 0:
            tail = "\n".join(result.stdout.splitlines()[-25:])
            raise ImageFailed(f"{what}: `{' '.join(command[:3])} ...` failed with code {result.returncode}:\n{tail}")


if __name__ == "__main__":
    print(build("fairlead-worker", CHECKOUT / "images" / "Containerfile.worker", WORKER_SOURCES))
