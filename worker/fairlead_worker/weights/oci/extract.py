"""Write the files of a layer below a folder, and nothing outside it: no links, no devices, no other files."""

import gzip
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from fairlead_worker.weights.oci.manifest import Layer, wanted_path

CHUNK = 4 << 20
HEADER_BYTES = 1 << 20
"""Limit of a header with long names, which tarfile reads into memory."""
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_LONG = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class _BoundedHeader(tarfile.TarInfo):
    """A member whose extension headers are small."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_BoundedHeader":
        found = super().frombuf(buf, encoding, errors)
        if found.type in _LONG and found.size > HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {found.size} bytes")
        return found


def place(layer: Layer, blob: Path, root: Path, patterns: Sequence[str], folder: str, check_space: Callable[[int], None]) -> None:
    """Move or unpack a verified blob. Raises ValueError for content that is refused, and OSError."""
    if layer.kind == "file":
        target = _target(root, layer.path)
        blob.replace(target)
        return
    with blob.open("rb") as file:
        # gzip reads several members in a row, as eStargz writes them; tarfile's own decompression does not.
        content = gzip.GzipFile(fileobj=file) if layer.kind == "tar+gzip" else file
        try:
            with tarfile.open(fileobj=content, mode="r|", tarinfo=_BoundedHeader) as archive:
                for member in archive:
                    _place_member(archive, member, root, patterns, folder, check_space)
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"layer {layer.digest} is no readable archive ({error})") from error
    blob.unlink()


def _place_member(
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    root: Path,
    patterns: Sequence[str],
    folder: str,
    check_space: Callable[[int], None],
) -> None:
    name = PurePosixPath(member.name.lstrip("/"))
    if name.name.startswith(_WHITEOUT):
        _remove(root, name)
        return
    path = wanted_path(member.name, patterns, folder)
    if path is None or member.isdir():
        return
    if not member.isreg():
        raise ValueError(f"{member.name} is a link or device: build it from plain files (cp -L)")
    check_space(member.size)
    source = archive.extractfile(member)
    assert source is not None
    _write(source, _target(root, path))


def _remove(root: Path, whiteout: PurePosixPath) -> None:
    """Remove what a later layer hides: one entry, or all of a folder."""
    parent, hidden = root / whiteout.parent, whiteout.name.removeprefix(_WHITEOUT)
    if ".." in whiteout.parts or hidden in ("", ".", ".."):
        return
    for entry in list(parent.glob("*")) if whiteout.name == _OPAQUE else [parent / hidden]:
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def _target(root: Path, path: str) -> Path:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    return target


def _write(source: IO[bytes], target: Path) -> None:
    with target.open("xb") as file:
        shutil.copyfileobj(source, file, CHUNK)
        file.flush()
        os.fsync(file.fileno())
