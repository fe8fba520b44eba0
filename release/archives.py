"""The chart and the contexts of the images as archives with the same bytes in each run."""

import gzip
import os
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path

from release.errors import ReleaseFailed
from release.tree import Tree

IMAGES = ("control", "worker", "worker-gpu")


def pack(target: Path, files: Mapping[str, Path], epoch: int) -> Path:
    """Write `files`, by their names in the archive, to `target`: sorted, without owners, all with the time `epoch`. Return `target`."""
    with (
        target.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=9, mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, path in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = path.stat().st_size, epoch
            entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            with path.open("rb") as content:
                archive.addfile(entry, content)
    return target


def pack_chart(tree: Tree, target: Path) -> Path:
    """Write the chart as `helm package` does, whose archives have another time in each run."""
    chart = tree.folder / "charts" / "fairlead"
    files = {f"fairlead/{path.relative_to(chart)}": path for path in walk(chart)}
    return pack(target / f"fairlead-{tree.version}.tgz", files, tree.epoch)


def pack_context(tree: Tree, image: str, target: Path) -> Path:
    """Write all that `docker build` needs for an image: its Containerfile and the files that it copies. Raises ReleaseFailed."""
    containerfile = tree.folder / "images" / f"Containerfile.{image}"
    files = {"Containerfile": containerfile}
    for source in copied(containerfile.read_text()):
        path = tree.folder / source
        if not path.exists():
            raise ReleaseFailed(f"images/{containerfile.name} copies {source}, which the commit does not have: commit it")
        files |= {str(each.relative_to(tree.folder)): each for each in walk(path)}
    return pack(target / f"context-{image}-{tree.version}.tar.gz", files, tree.epoch)


def copied(containerfile: str) -> list[str]:
    """Return the paths in the context that a Containerfile copies, without those of other stages."""
    text = re.sub(r"\\\n\s*", " ", containerfile)
    lines = [line.split()[1:] for line in text.splitlines() if line.startswith(("COPY ", "ADD "))]
    return [word for words in lines if not words[0].startswith("--from") for word in words[:-1] if not word.startswith("--")]


def walk(path: Path) -> list[Path]:
    """Return the files below a path, or the file itself."""
    return [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
