"""The settings that are compared: how a model's weights, activations and KV are rounded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Type
from tests.worker.exactness.harness import Engine

from bench.quality.engine import make_engine
from bench.quality.gguf_files import TYPES, gguf_file
from fairlead_worker.model.loader import load_model


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of `load_model`."""
    file: Type | None = None
    """Type of the GGUF file that is loaded instead of the float32 folder."""
    published: bool = False
    """Whether the GGUF file is loaded as it was published."""
    backend: str = "auto"
    """Of attention."""

    def open(self, source: Path, folder: Path, tokens: int) -> tuple[Engine, str]:
        """Return an engine with KV for `tokens`, and its path. `source`: the published GGUF file. Raises ModelLoadError."""
        loaded = load_model(str(self._weights(source, folder)), **self.arguments)
        return make_engine(loaded, tokens, backend=self.backend)

    def _weights(self, source: Path, folder: Path) -> Path:
        if self.published:
            return source
        return folder if self.file is None else gguf_file(source, self.file)


BFLOAT16 = {"dtype": "bfloat16"}
SETTINGS = (
    Setting("float32", {"dtype": "float32"}),
    Setting("bfloat16", BFLOAT16),
    Setting("int8", BFLOAT16 | {"quantization": "int8"}),
    Setting("int4", BFLOAT16 | {"quantization": "int4"}),
    # No kernel of a CPU reads KV in float8: the reference does, and rounds to the same numbers as a GPU.
    Setting("KV in float8", BFLOAT16 | {"kv_cache_dtype": "fp8"}, backend="reference"),
    *(Setting(f"GGUF {kind.name}", BFLOAT16, file=kind) for kind in TYPES),
    Setting("GGUF as published", BFLOAT16, published=True),
)
