"""The model that all servers serve: trained weights of the package index (`tests/real_models.py`).

Safetensors in bf16 for servers that read folders. GGUF files of the same weights for the others: as published, and in further types.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.real_models import GEMMA3, convert

from bench.other_servers.environments import NotMade
from bench.other_servers.requantize import requantize
from fairlead.packaged_model import SMOLLM2, ModelUnavailable

TRAINED = {"smollm2": SMOLLM2, "gemma3": GEMMA3}


@dataclass(frozen=True)
class Model:
    """A model in the forms that servers need."""

    name: str
    folder: Path
    """Safetensors in bf16, and the tokenizer."""
    published: Path
    """The GGUF file that `folder` was widened from."""

    def gguf(self, kind: str) -> Path:
        """Return a GGUF file of the weights in one type, such as "Q8_0", made once. "published": the file as it is."""
        if kind == "published":
            return self.published
        path = self.published.with_name(f"{self.published.stem}-{kind}.gguf")
        if not path.exists():
            requantize(self.published, path, kind)
        return path

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values in bf16."""
        config = json.loads((self.folder / "config.json").read_text())
        heads = config["num_attention_heads"]
        width = config.get("num_key_value_heads", heads) * (config.get("head_dim") or config["hidden_size"] // heads)
        return 2 * 2 * int(config["num_hidden_layers"] * width)


def make(name: str) -> Model:
    """Return the model `name`. Raises NotMade if the package index is away."""
    try:
        published = TRAINED[name].fetch()
    except ModelUnavailable as error:
        raise NotMade(f"{name} is away: {error}") from error
    return Model(name, convert(published, "bfloat16"), published)
