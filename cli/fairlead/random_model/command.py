"""`fairlead make-model DIR --arch …`."""

import logging
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from fairlead.console import make_console
from fairlead.options import takes
from fairlead.program import describe, new_app
from fairlead.random_model.build import make_model, read_recipe
from fairlead.random_model.recipe import ARCHITECTURES, DTYPES

app = new_app()


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options of `fairlead make-model`. None: the recipe's own default."""

    directory: Annotated[str, typer.Argument(metavar="DIR")]
    arch: Annotated[str, typer.Option(metavar="ARCH", help=f"One of {', '.join(ARCHITECTURES)}.")] = "qwen3"
    hidden: Annotated[int | None, typer.Option(metavar="N", help="Width of the residual stream (default 64).")] = None
    layers: Annotated[int | None, typer.Option(metavar="N", help="Number of layers (default 2).")] = None
    heads: Annotated[int | None, typer.Option(metavar="N", help="Attention heads (default 4); must divide --hidden.")] = None
    kv_heads: Annotated[int | None, typer.Option(metavar="N", help="KV heads (default half of --heads); must divide --heads.")] = None
    head_dim: Annotated[int | None, typer.Option(metavar="N", help="Width of one head (default hidden / heads).")] = None
    intermediate: Annotated[int | None, typer.Option(metavar="N", help="Width of the MLP (default 2 x hidden).")] = None
    vocab: Annotated[int | None, typer.Option(metavar="N", help="Tokens in the vocabulary (default 2048).")] = None
    max_positions: Annotated[int | None, typer.Option(metavar="N", help="Longest sequence, tokens (default 4096).")] = None
    sliding_window: Annotated[
        int | None, typer.Option(metavar="N", help="Mistral, gemma3: tokens that a windowed layer attends to (default 256).")
    ] = None
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the weights (default 0).")] = None
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help=f"One of {', '.join(DTYPES)} (default float32).")] = None
    force: Annotated[bool, typer.Option("--force", help="Replace the model in DIR.")] = False


@app.command(
    help=describe(
        "Create a random-weight model with tokenizer and chat template, in seconds and without a download.",
        "fairlead make-model ./tiny",
        "fairlead make-model ./wide --arch llama --hidden 512 --layers 6 --heads 8",
    )
)
@takes(ModelOptions)
def run(options: ModelOptions) -> int:
    recipe = {name: value for name, value in asdict(options).items() if name not in ("directory", "arch", "force") and value is not None}
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # warns of enums of packages that this command does not use
    started, is_new = time.monotonic(), not read_recipe(Path(options.directory).expanduser()) or options.force
    path = make_model(options.directory, options.arch, force=options.force, **recipe)
    megabytes = sum(file.stat().st_size for file in path.iterdir()) / 1e6
    took = f"{time.monotonic() - started:.1f} s" if is_new else "exists already, unchanged"
    console = make_console()
    console.print(f"{path}  {options.arch}, {megabytes:.1f} MB, {took}", soft_wrap=True)
    console.print(f"serve it: fairlead serve {shlex.quote(options.directory)}", style="dim", markup=False, soft_wrap=True)
    return 0
