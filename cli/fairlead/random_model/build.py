"""Write a random model's directory: weights, tokenizer, chat template, generation config."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from fairlead.errors import UserError
from fairlead.random_model.recipe import Recipe

RECIPE_FILE = "fairlead-recipe.json"
"""File in the finished directory with the model's recipe, so that the same recipe is not built twice."""


def make_model(path: str | Path, arch: str = "qwen3", *, force: bool = False, **options: Any) -> Path:
    """Create a random-weight model in the directory `path` and return the path.

    `options` are `Recipe.of`'s: hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, max_positions, sliding_window, seed, dtype.
    An existing model of the same recipe is kept, unless `force` is given. Raises `UserError` if the recipe cannot be built, if the
    directory contains other files, or if it contains another random model and `force` is not given. The directory appears complete or not
    at all.
    """
    recipe = Recipe.of(arch, **options)
    target = Path(path).expanduser().absolute()
    before, wanted = read_recipe(target), recipe.as_dict()
    if before == wanted and not force:
        return target
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file: give a directory")
    if target.is_dir() and any(target.iterdir()):
        if before is None:  # never delete files that this command did not create
            raise UserError(f"{target} contains files of something else: give another directory")
        if not force:
            differs = ", ".join(f"{name} {before.get(name)}, not {value}" for name, value in wanted.items() if before.get(name) != value)
            raise UserError(f"{target} has a random model already ({differs}): give --force to replace it, or another directory")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{target} cannot be created ({error.strerror}): give a writable directory") from None
    try:
        _write(recipe, building)
        building.chmod(0o755)
        if target.is_dir():
            shutil.rmtree(target)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def read_recipe(directory: Path) -> dict[str, Any] | None:
    """Return the recipe of a finished directory; None for any other directory."""
    try:
        recipe = json.loads((directory / RECIPE_FILE).read_text())
    except (OSError, ValueError):
        return None
    return recipe if isinstance(recipe, dict) else None


def _write(recipe: Recipe, directory: Path) -> None:
    # Late imports: torch and transformers take seconds, and errors of the recipe should not wait for them.
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    from fairlead.random_model.architectures import build_config
    from fairlead.random_model.tokenizer import END_OF_TEXT, IM_END, SPECIAL_TOKENS, save_tokenizer

    logging.disable_progress_bar()  # one shard in milliseconds needs no bar
    config = build_config(recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, recipe.dtype))
    end, im_end = SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(IM_END)
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=[im_end, end], pad_token_id=end)
    model.save_pretrained(directory)
    for weights in directory.glob("*.safetensors"):  # safetensors makes them readable by their owner only; a worker may run as another user
        weights.chmod((directory / "config.json").stat().st_mode)
    save_tokenizer(directory, vocab=recipe.vocab, max_positions=recipe.max_positions)
    (directory / RECIPE_FILE).write_text(json.dumps(recipe.as_dict(), indent=1) + "\n")
