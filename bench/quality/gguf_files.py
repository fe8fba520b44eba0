"""GGUF files of every supported type, made from a real one: its metadata, and its weights widened and quantized again.

They are made once and kept in the user's cache, beside the file that they come from.
"""

import fcntl
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor
from gguf.quants import dequantize, quantize

from bench.quality.k_quants import GROUP, quantize_k

TYPES = (Type.F16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q4_K, Type.Q5_K, Type.Q6_K)
WITHOUT_K = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}
"""Types of llama.cpp for rows that do not fill blocks of 256."""
EMBEDDING = "token_embd.weight"


def gguf_file(source: Path, kind: Type) -> Path:
    """Return a file with the weights of the GGUF file `source` in `kind`."""
    file = source.parent / "types" / f"{kind.name}.gguf"
    file.parent.mkdir(exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            made = file.with_suffix(".part")
            _write(GGUFReader(source), kind, made)
            made.rename(file)
    return file


def _write(source: GGUFReader, kind: Type, to: Path) -> None:
    writer = GGUFWriter(to, source.fields["general.architecture"].contents())
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for tensor in source.tensors:
        chosen = _type_of(tensor, kind)
        writer.add_tensor(tensor.name, _convert(tensor, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _type_of(tensor: ReaderTensor, kind: Type) -> Type:
    """Return the type of a tensor in a file of `kind`, as llama.cpp chooses it.

    Vectors stay as they are. The embedding, which is also the head, has at least 8 bits.
    """
    if len(tensor.shape) == 1:
        return tensor.tensor_type
    if tensor.name == EMBEDDING and kind != Type.F16:
        return Type.Q8_0
    return WITHOUT_K.get(kind, kind) if tensor.shape[0] % GROUP else kind


def _convert(tensor: ReaderTensor, kind: Type) -> np.ndarray:
    if kind == tensor.tensor_type:
        return tensor.data
    weights = dequantize(tensor.data, tensor.tensor_type)
    return quantize_k(weights, kind) if kind in WITHOUT_K else quantize(weights, kind)
