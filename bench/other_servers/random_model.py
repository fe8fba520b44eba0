"""Random weights, used if no trained ones are asked for or the index is away: Qwen3-shaped, 89M parameters, bf16, tied embeddings.

The tokenizer is trained on English.
"""

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from bench.engine.step_time import SHAPES
from fairlead.random_model.tokenizer import END_OF_TEXT, IM_END, SPECIAL_TOKENS, save_tokenizer

POSITIONS = 4096
MARK = "bench.json"


def make(folder: Path) -> Path:
    """Return the model's folder. Create the model if it does not exist."""
    shape = SHAPES["90M"] | {
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "max_position_embeddings": POSITIONS,
        # Larger than usual: a random model with tied embeddings repeats its last token else, and some token is half a character.
        "initializer_range": 0.2,
    }
    if (folder / MARK).is_file() and json.loads((folder / MARK).read_text()) == shape:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    transformers_logging.disable_progress_bar()
    end, im_end = SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(IM_END)
    torch.manual_seed(1)
    config = AutoConfig.for_model("qwen3", **shape, bos_token_id=end, eos_token_id=im_end, pad_token_id=end)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=im_end, pad_token_id=end)
    model.save_pretrained(folder)
    save_tokenizer(folder, vocab=SHAPES["90M"]["vocab_size"], max_positions=POSITIONS)
    (folder / MARK).write_text(json.dumps(shape))
    return folder
