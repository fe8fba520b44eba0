"""Models with random weights, in shapes that the benchmarks share, written to disk once per run."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

_QWEN3: dict[str, object] = {"num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 8192}
SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2-124M": ("gpt2", {}),
    "qwen3-90M": (
        "qwen3",
        _QWEN3 | {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2304, "vocab_size": 8192},
    ),
    "tiny": (
        "qwen3",
        _QWEN3 | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 512},
    ),
}


@contextmanager
def saved(shape: str, dtype: torch.dtype = torch.bfloat16) -> Iterator[str]:
    """Yield a folder with the model, for `load_model`. It is removed when the context ends."""
    transformers_logging.disable_progress_bar()
    kind, settings = SHAPES[shape]
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=dtype).save_pretrained(folder)
        yield folder
