"""`fairlead make-model DIR --arch …`."""

import argparse
import time

from fairlead.console import make_console
from fairlead.random_model.build import make_model
from fairlead.random_model.recipe import ARCHITECTURES, DTYPES

_SIZES = {
    "hidden": "width of the residual stream (default 64)",
    "layers": "number of layers (default 2)",
    "heads": "attention heads (default 4); must divide --hidden",
    "kv-heads": "KV heads (default half of --heads); must divide --heads",
    "head-dim": "width of one head (default hidden / heads)",
    "intermediate": "width of the MLP (default 2 x hidden)",
    "vocab": "tokens in the vocabulary (default 2048)",
    "max-positions": "longest sequence, tokens (default 4096)",
    "sliding-window": "mistral, gemma3: tokens that a windowed layer attends to (default 256)",
    "seed": "seed of the weights (default 0)",
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("make-model", help="create a random-weight model with tokenizer and chat template, locally in seconds")
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--arch", default="qwen3", metavar="ARCH", help=f"one of {', '.join(ARCHITECTURES)} (default qwen3)")
    for flag, meaning in _SIZES.items():
        parser.add_argument(f"--{flag}", type=int, metavar="N", help=meaning)
    parser.add_argument("--dtype", metavar="DTYPE", help=f"one of {', '.join(DTYPES)} (default float32)")
    parser.add_argument("--force", action="store_true", help="replace the model in DIR")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    given = {flag.replace("-", "_"): getattr(arguments, flag.replace("-", "_")) for flag in [*_SIZES, "dtype"]}
    options = {name: value for name, value in given.items() if value is not None}
    started = time.monotonic()
    path = make_model(arguments.directory, arguments.arch, force=arguments.force, **options)
    megabytes = sum(file.stat().st_size for file in path.iterdir()) / 1e6
    make_console().print(f"{path}  {arguments.arch}, {megabytes:.1f} MB, {time.monotonic() - started:.1f} s", soft_wrap=True)
    return 0
