"""Models of random weights, made in place, and the engine around them."""

import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.gpu.device import Device
from fairlead.random_model.tokenizer import save_tokenizer
from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.scheduler import Scheduler

POSITIONS = 40_960
SHAPES: dict[str, dict[str, int]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 128_256},
    "8b-short": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32, "vocab_size": 128_256},
    "small": {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 16, "num_attention_heads": 8, "vocab_size": 128_256},
    "tiny": {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000},
}
"""Llama 3.1 8B's, with 8 KV heads, and the same with a quarter of its layers; with 2 a small one of the same vocabulary, and one for dry
runs. Heads of 128, 64 and 64."""


def kv_heads(shape: str) -> int:
    return 8 if shape.startswith("8b") else 2


def head_dim(shape: str) -> int:
    sizes = SHAPES[shape]
    return sizes["hidden_size"] // sizes["num_attention_heads"]


def save_llama(device: Device, folder: Path, shape: str) -> Path:
    """A model in `folder`: weights drawn on the device, in bfloat16."""
    sizes = SHAPES[shape]
    heads = {"num_key_value_heads": kv_heads(shape), "max_position_embeddings": POSITIONS, "tie_word_embeddings": False}
    config = LlamaConfig(**sizes, **heads)
    torch.manual_seed(1)
    with device.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    save_tokenizer(folder, vocab=config.vocab_size, max_positions=POSITIONS)
    return folder


@contextmanager
def saved(device: Device, shape: str) -> Iterator[Path]:
    """The folder of `shape`, made once for all stages of a run; without a folder of the run, for this once."""
    with nullcontext(str(device.folder)) if device.folder else tempfile.TemporaryDirectory(dir=os.environ.get("GPU_CHECK_TMP")) as root:
        folder = Path(root) / shape
        if not folder.is_dir():
            fresh = Path(root) / f"{shape}.tmp"  # one that is left half written is not taken for a model
            save_llama(device, fresh, shape).rename(folder)
        yield folder


def weight_bytes(shape: str) -> tuple[int, int]:
    """Of the layers in bfloat16, and of the head, which a chunk needs for one token alone. Of the embeddings a step takes some rows."""
    sizes = SHAPES[shape]
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"] + kv_heads(shape)
    layer = 2 * hidden * heads * head_dim(shape) + 3 * hidden * sizes["intermediate_size"]
    return 2 * sizes["num_hidden_layers"] * layer, 2 * hidden * sizes["vocab_size"]


def scheduler_for(runner: ModelRunner, **settings: Any) -> Scheduler:
    """A scheduler over the runner's pages."""
    page_size = runner.backend.spec.page_size
    config = SchedulerConfig(runner.loaded.max_model_len, eos_token_ids=(), **settings)
    return Scheduler(config, PrefixCache(PagePool(runner.backend.pages, page_size), 4 * page_size, extend))


def submit(scheduler: Scheduler, name: int, prompt: Sequence[int], sampling: Sampling, adapter: int = 0) -> None:
    """One request. AssertionError where it is refused."""
    refused = scheduler.submit(Submit(str(name), array("I", prompt).tobytes(), sampling, 1, adapter=adapter))
    assert refused is None, refused


def serve(runner: ModelRunner, scheduler: Scheduler) -> dict[int, list[int]]:
    """Step to the end: every request's tokens."""
    tokens: dict[int, list[int]] = {}
    while plan := scheduler.plan():
        for output in scheduler.advance(plan, runner.execute(plan)):
            tokens.setdefault(int(output.id), []).extend(memoryview(output.tokens).cast("I").tolist())
    assert scheduler.idle
    return tokens
