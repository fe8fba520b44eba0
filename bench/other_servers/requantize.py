"""A GGUF file with the weights of another one in a different type. Metadata and tokenizer stay as they are."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize


def requantize(source: Path, target: Path, kind: str) -> None:
    """Write `source` to `target` with matrices of type `kind`, for example "Q8_0". Vectors are float32."""
    reader, made = GGUFReader(source), target.with_suffix(".part")
    architecture = "general.architecture"
    writer = GGUFWriter(made, reader.fields[architecture].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in (architecture, "general.file_type"):
            sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        as_type = GGMLQuantizationType[kind] if weights.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, np.ascontiguousarray(quantize(weights, as_type)), raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made.rename(target)
