"""Reader of GGUF files: metadata, and where each tensor is. Nothing of a tensor is read.

Not `gguf.GGUFReader`: it makes a numpy array for each token of the vocabulary, which takes 6 s for SmolLM2-135M and 30 s for Gemma 3's
262,144 tokens. This takes 0.1 and 0.3 s. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import mmap
import re
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn

TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
"""Number of a type in the file -> its name, the values of a block and the bytes of a block."""
_VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_MOST_ALIGNMENT = 1 << 20
_MOST_ELEMENTS = 1 << 24
"""Of an array: 64 times the 262,144 tokens of Gemma."""
_LEAST_FIELD, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
"""Bytes of the smallest field, and of the smallest description of a tensor."""
SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""The name of one part of a model in several files, as llama.cpp's `gguf-split` writes it."""


class GgufError(Exception):
    """A file that cannot be used. The message names the file, the field, and what to do."""

    def __init__(self, path: Path, cause: str) -> None:
        super().__init__(f"{path.name}: {cause}")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file."""

    name: str
    shape: tuple[int, ...]
    """The last dimension is contiguous, as in torch."""
    type: str
    """Of TYPES."""
    path: Path
    offset: int
    """Of its first byte in the file."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Gguf:
    """A model, from one file or from all parts of a split one."""

    path: Path
    """The first file."""
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def part_paths(path: Path) -> list[Path]:
    """Return the files of the model that `path` belongs to, in order: `path` alone if its name is not one of a part."""
    found = SPLIT.fullmatch(path.name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]):
        return [path]
    return [path.with_name(f"{found['stem']}-{number:05}-of-{found['count']}.gguf") for number in range(1, int(found["count"]) + 1)]


def read_gguf(path: Path, *, texts: bool = True) -> Gguf:
    """Read a model. texts: False leaves out arrays of texts, such as the vocabulary.

    Raises GgufError, and OSError of a file that cannot be opened.
    """
    paths = part_paths(path)
    if missing := next((part for part in paths if not part.is_file()), None):
        raise GgufError(path, f"it is one of {len(paths)} parts, and {missing.name} is not beside it: put all parts into one folder")
    metadata, tensors = _Reader(paths[0], texts).read()
    count = metadata.get("split.count", 1)
    if count != len(paths):
        raise GgufError(
            paths[0], f"split.count is {count!r}, and its name says {len(paths)}: give the parts the names that gguf-split gave them"
        )
    for part in paths[1:]:
        further = _Reader(part, texts).read()[1]
        if double := next(iter(tensors.keys() & further.keys()), None):
            _fail(part, f"tensor {double} is in another part too")
        tensors |= further
    expected = metadata.get("split.tensors.count", len(tensors))
    if len(paths) > 1 and expected != len(tensors):
        _fail(paths[0], f"split.tensors.count is {expected!r}, and the parts have {len(tensors)} tensors")
    return Gguf(paths[0], metadata, tensors)


def _fail(path: Path, cause: str) -> NoReturn:
    raise GgufError(path, f"{cause}: the file is damaged or incomplete, fetch or convert it again")


class _Reader:
    """A cursor over one mapped file. Every count is compared with the bytes that remain, before anything is allocated for it."""

    def __init__(self, path: Path, texts: bool) -> None:
        self._path, self._texts, self._at = path, texts, 0
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8 or start[:4] != b"GGUF":
                kind = f"it begins with {start[:4]!r}" if start else "it is empty"
                raise GgufError(path, f"{kind}, not with GGUF: it is no GGUF file, or its download ended early")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return metadata and tensors."""
        with self._data:
            self._at = 4
            self._check_version()
            tensor_count = self._count("tensor_count", _LEAST_TENSOR)
            metadata = self._read_metadata(self._count("metadata_kv_count", _LEAST_FIELD))
            described = [self._read_tensor() for _ in range(tensor_count)]
            alignment = self._alignment(metadata)
            return metadata, self._place(described, -(-self._at // alignment) * alignment, alignment)

    def _check_version(self) -> None:
        version = self._number("I", "version")
        if version & 0xFFFF == 0:
            raise GgufError(self._path, "it is a big-endian file: convert the model for little-endian machines")
        if version not in (2, 3):
            raise GgufError(self._path, f"version {version} is not supported: convert the model with a current llama.cpp (version 3)")

    def _read_metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string("a key of the metadata")
            if key in metadata:
                _fail(self._path, f"{key} is there twice")
            metadata[key] = self._value(key, self._number("I", key))
        return metadata

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            return self._number(self._format(key, kind), key)
        kind, count = self._number("I", key), self._number("Q", key)
        if count > _MOST_ELEMENTS:
            _fail(self._path, f"{key} counts {count} elements, and {_MOST_ELEMENTS} are the most")
        if kind == _STRING:
            self._check_room(key, count, 8)
            texts = (self._string(key) if self._texts else self._bytes(key) for _ in range(count))
            return [text for text in texts if self._texts]
        if kind == _ARRAY:
            raise GgufError(self._path, f"{key} is an array of arrays, which no known file has: convert the model again")
        each = struct.calcsize(form := self._format(key, kind))
        self._check_room(key, count, each)
        values = struct.unpack_from(f"<{count}{form}", self._data, self._at)
        self._at += count * each
        return list(values)

    def _format(self, key: str, kind: int) -> str:
        if kind not in _VALUES:
            _fail(self._path, f"{key} has a value of unknown type {kind}")
        return _VALUES[kind]

    def _read_tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("the name of a tensor")
        dimensions = self._number("I", name)
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            _fail(self._path, f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self._number("Q", name) for _ in range(dimensions))[::-1]
        return name, shape, self._number("I", name), self._number("Q", name)

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= _MOST_ALIGNMENT or alignment % 8:
            _fail(self._path, f"general.alignment is {alignment!r}, not a multiple of 8")
        return alignment

    def _place(self, described: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, shape, kind, offset in described:
            if name in tensors:
                _fail(self._path, f"tensor {name} is there twice")
            if kind not in TYPES:
                known = ", ".join(label for label, _, _ in TYPES.values())
                raise GgufError(
                    self._path, f"tensor {name} has type {_type_name(kind)}, which is not supported: quantize the model as {known}"
                )
            label, values, block = TYPES[kind]
            if shape[-1] % values:
                _fail(self._path, f"tensor {name} has rows of {shape[-1]} values, and a block of {label} has {values}")
            if offset % alignment:
                _fail(self._path, f"tensor {name} has offset {offset}, not a multiple of the alignment of {alignment}")
            size = prod(shape) // values * block
            if not size or start + offset + size > len(self._data):
                _fail(
                    self._path,
                    f"tensor {name} {list(shape)} takes {size} bytes from byte {start + offset} on, and the file ends at {len(self._data)}",
                )
            tensors[name] = Tensor(name, shape, label, self._path, start + offset, size)
        for first, second in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
            if first.offset + first.size > second.offset:
                _fail(self._path, f"tensors {first.name} and {second.name} overlap")
        return tensors

    def _count(self, name: str, least: int) -> int:
        count: int = self._number("Q", name)
        self._check_room(name, count, least)
        return count

    def _check_room(self, name: str, count: int, each: int) -> None:
        left = len(self._data) - self._at
        if count * each > left:
            _fail(self._path, f"{name} counts {count}, which take {count * each} bytes or more, and {left} are left")

    def _number(self, form: str, name: str) -> Any:
        size = struct.calcsize(f"<{form}")
        self._check_room(name, 1, size)
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += size
        return value

    def _string(self, name: str) -> str:
        try:
            return self._bytes(name).decode()
        except UnicodeDecodeError:
            _fail(self._path, f"{name} is not UTF-8")

    def _bytes(self, name: str) -> bytes:
        begin = self._at + 8
        size = int.from_bytes(self._data[self._at : begin], "little")
        if begin + size > len(self._data):
            _fail(self._path, f"{name} has a text of {size} bytes, and {max(0, len(self._data) - begin)} are left")
        self._at = begin + size
        return self._data[begin : self._at]


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"number {kind}"
