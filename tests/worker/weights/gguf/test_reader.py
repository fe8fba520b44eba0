"""Damaged and hostile GGUF files are refused with their name, the field and what to do, and cost no memory and no time."""

import re
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.gguf_models import small_model, write_gguf

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.gguf import folder
from fairlead_worker.weights.gguf.architectures import make_config
from fairlead_worker.weights.gguf.folder import gguf_folder, whole_models
from fairlead_worker.weights.gguf.reader import Gguf, GgufError, part_paths, read_gguf

COUNTS = struct.Struct("<4sIQQ")
"""Magic, version, tensors, fields."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(small_model("llama"), tmp_path_factory.mktemp("gguf") / "good.gguf", "Q8_0")


def refusal(path: Path) -> str:
    with pytest.raises(GgufError) as refused:
        read_gguf(path)
    assert str(refused.value).startswith(f"{path.name}: ")
    return str(refused.value)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors: int = 0, fields: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return COUNTS.pack(b"GGUF", version, tensors, fields) + rest


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


BROKEN = {
    "empty": (b"", "it is empty"),
    "another kind": (b"PK\x03\x04" + bytes(60), "not with GGUF"),
    "a web page": (b"<!DOCTYPE html>", "not with GGUF"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
    "first version": (header(version=1), "version 1 is not supported"),
    "later version": (header(version=9), "version 9 is not supported"),
    "tensors that cannot be": (header(tensors=1 << 60), "tensor_count counts 1152921504606846976"),
    "fields that cannot be": (header(fields=1 << 40), "metadata_kv_count counts 1099511627776"),
    "a key without end": (header(fields=1, rest=struct.pack("<Q", 1 << 62) + bytes(40)), "a key of the metadata has a text of"),
    "a text without end": (header(fields=1, rest=text("a.b") + struct.pack("<IQ", 8, 1 << 50) + bytes(40)), "a.b has a text of"),
    "an array without end": (header(fields=1, rest=text("a.b") + struct.pack("<IIQ", 9, 4, 1 << 50) + bytes(40)), "a.b counts"),
    "texts without end": (header(fields=1, rest=text("a.b") + struct.pack("<IIQ", 9, 8, 1 << 50) + bytes(40)), "a.b counts"),
    "more elements than memory": (
        header(fields=1, rest=text("a.b") + struct.pack("<IIQ", 9, 0, (1 << 24) + 1) + bytes(40)),
        "a.b counts 16777217 elements, and 16777216 are the most",
    ),
    "nested arrays": (header(fields=1, rest=text("a.b") + struct.pack("<IIQ", 9, 9, 1) + bytes(40)), "a.b is an array of arrays"),
    "an unknown kind of value": (
        header(fields=1, rest=text("a.b") + struct.pack("<I", 77) + bytes(40)),
        "a.b has a value of unknown type 77",
    ),
    "a field twice": (header(fields=2, rest=2 * (text("a.b") + struct.pack("<II", 4, 1))), "a.b is there twice"),
    "no text": (header(fields=1, rest=text("a.b") + struct.pack("<IQ", 8, 2) + b"\xff\xff" + bytes(40)), "a.b is not UTF-8"),
    "dimensions": (header(tensors=1, rest=text("t") + struct.pack("<I", 1 << 30) + bytes(80)), "tensor t has 1073741824 dimensions"),
    "no size": (header(tensors=1, rest=tensor("t", (0, 4), 0) + bytes(80)), "tensor t [4, 0] takes 0 bytes"),
    "a size that cannot be": (header(tensors=1, rest=tensor("t", (1 << 40, 1 << 40), 0) + bytes(80)), "tensor t [1099511627776"),
    "an offset that cannot be": (
        header(tensors=1, rest=tensor("t", (4,), 0, 1 << 62) + bytes(80)),
        "tensor t [4] takes 16 bytes from byte",
    ),
    "an offset between alignments": (
        header(tensors=1, rest=tensor("t", (4,), 0, 8) + bytes(80)),
        "tensor t has offset 8, not a multiple of the alignment of 32",
    ),
    "half a block": (header(tensors=1, rest=tensor("t", (40, 2), 2) + bytes(80)), "rows of 40 values, and a block of Q4_0 has 32"),
    "a tensor twice": (header(tensors=2, rest=2 * tensor("t", (4,), 0) + bytes(80)), "tensor t is there twice"),
    "tensors in one place": (
        header(tensors=2, rest=tensor("t", (16,), 0) + tensor("u", (4,), 0, 32) + bytes(160)),
        "tensors t and u overlap",
    ),
    "a type of few bits": (
        header(tensors=1, rest=tensor("t", (256, 2), 10) + bytes(800)),
        "tensor t has type Q2_K, which is not supported",
    ),
    "an unknown type": (header(tensors=1, rest=tensor("t", (256, 2), 999) + bytes(800)), "tensor t has type number 999"),
    "alignment": (
        header(fields=1, rest=text("general.alignment") + struct.pack("<II", 4, 0) + bytes(40)),
        "general.alignment is 0",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    content, cause = BROKEN[case]
    message = refusal(write(tmp_path / "m.gguf", content))
    assert cause in message
    assert re.search(r"(again|early|machines|version 3\)|quantize the model as .*)$", message), "it says what to do"


def test_a_file_that_ends_anywhere_is_refused(good: Path, tmp_path: Path) -> None:
    whole = good.read_bytes()
    for size in sorted({*range(0, 400, 7), *range(400, len(whole), 9973), len(whole) - 1}):
        refusal(write(tmp_path / "m.gguf", whole[:size]))


def test_whatever_describing_raises_is_refused_by_name(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf: Gguf) -> None:
        raise KeyError("a field")

    monkeypatch.setattr(folder, "make_config", fail)
    with pytest.raises(ModelLoadError, match=r"good\.gguf: it is damaged or not supported \(KeyError: 'a field'\): fetch or convert it"):
        gguf_folder("m", good, ModelCache(tmp_path))


def test_a_count_of_layers_costs_no_memory(good: Path) -> None:
    read = read_gguf(good)
    read.metadata["llama.block_count"] = 1 << 24
    tracemalloc.start()
    with pytest.raises(GgufError, match="block_count is 16777216, and it has tensors of 2 layers"):
        make_config(read)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 6000), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_changed_bytes_never_crash(good: Path, tmp_path: Path, changes: list[tuple[int, bytes]]) -> None:
    """Whatever is read is refused as a model that cannot be loaded, or described."""
    content = bytearray(good.read_bytes())
    for at, new in changes:
        content[at : at + len(new)] = new
    path = write(tmp_path / "m.gguf", bytes(content))
    try:
        gguf_folder(path.as_uri(), path, ModelCache(tmp_path / "cache"))
    except ModelLoadError as error:
        assert "m.gguf" in error.cause


def split(tmp_path: Path) -> list[Path]:
    """Write a model in two files, as gguf-split does."""
    paths = [tmp_path / f"m-{number:05}-of-00002.gguf" for number in (1, 2)]
    for number, path in enumerate(paths):
        writer = GGUFWriter(path, "llama")
        writer.add_uint16("split.count", 2)
        writer.add_uint16("split.no", number)
        writer.add_int32("split.tensors.count", 2)
        writer.add_tensor(f"t{number}", np.ones((2, 4), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_any_part_of_a_split_model_stands_for_all(tmp_path: Path) -> None:
    paths = split(tmp_path)
    for path in paths:
        assert part_paths(path) == paths
        found = read_gguf(path)
        assert found.path == paths[0] and {name: one.path for name, one in found.tensors.items()} == dict(
            zip(("t0", "t1"), paths, strict=True)
        )
    paths[1].unlink()
    assert "m-00002-of-00002.gguf is not beside it" in refusal(paths[0])


@pytest.mark.parametrize("name", ["m-00001-of-00000.gguf", "m-00003-of-00002.gguf", "m-00000-of-00002.gguf"])
def test_a_name_of_no_part_is_a_name_of_one_file(name: str, good: Path, tmp_path: Path) -> None:
    path = write(tmp_path / name, good.read_bytes())
    assert part_paths(path) == whole_models(tmp_path) == [path]
    assert gguf_folder("m", path, ModelCache(tmp_path / "cache")).is_dir()


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    first, _ = split(tmp_path)
    assert "split.count is 2, and its name says 1" in refusal(first.rename(tmp_path / "m.gguf"))
