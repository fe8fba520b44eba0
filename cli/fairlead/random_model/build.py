"""Write a random model's directory: weights, tokenizer, chat template, generation config."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from fairlead.errors import UserError
from fairlead.random_model.recipe import Recipe

RECIPE_FILE = "fairlead-recipe.json"
"""Lies in the finished directory and says what it was made from, so that the same recipe is not built twice."""


def make_model(path: str | Path, arch: str = "qwen3", *, force: bool = False, **options: Any) -> Path:
    """Make a random-weight model in the directory `path` and return it.

    `options` are `Recipe.of`'s: hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, max_positions, sliding_window, seed, dtype.
    The same recipe already there is kept as it is (instantly). Raises `UserError` when the recipe cannot be built, when the directory
    holds anything but a random model, or another one and `force` is not given. The directory appears whole or not at all.
    """
    recipe = Recipe.of(arch, **options)
    target = Path(path).expanduser().absolute()
    if made_from(target) == recipe.as_dict():
        return target
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file: give a directory")
    if target.is_dir() and any(target.iterdir()):
        if made_from(target) is None:  # never delete what this command did not make
            raise UserError(f"{target} holds other files: give another directory")
        if not force:
            raise UserError(f"{target} holds another random model: give --force to replace it, or another directory")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{target} cannot be made ({error.strerror}): give a directory that you can write") from None
    try:
        _write(recipe, building)
        building.chmod(0o755)
        if target.is_dir():
            shutil.rmtree(target)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def made_from(directory: Path) -> dict[str, Any] | None:
    """The recipe a finished directory was made from; None for anything else."""
    try:
        recipe = json.loads((directory / RECIPE_FILE).read_text())
    except (OSError, ValueError):
        return None
    return recipe if isinstance(recipe, dict) else None


def _write(recipe: Recipe, directory: Path) -> None:
    # Imported here: torch and transformers take seconds, and the recipe's errors should not wait for them.
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    from fairlead.random_model.architectures import config_for
    from fairlead.random_model.tokenizer import END_OF_TEXT, IM_END, SPECIAL_TOKENS, save_tokenizer

    logging.disable_progress_bar()  # one shard in milliseconds needs no bar
    config = config_for(recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, recipe.dtype))
    end, im_end = SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(IM_END)
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=[im_end, end], pad_token_id=end)
    model.save_pretrained(directory)
    for weights in directory.glob("*.safetensors"):  # safetensors writes them for their owner alone; a worker may be another user
        weights.chmod((directory / "config.json").stat().st_mode)
    save_tokenizer(directory, vocab=recipe.vocab, max_positions=recipe.max_positions)
    (directory / RECIPE_FILE).write_text(json.dumps(recipe.as_dict(), indent=1) + "\n")
