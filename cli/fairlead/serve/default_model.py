"""The model that `fairlead serve` serves without MODEL: SmolLM2, from the package index."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from fairlead.errors import UserError
from fairlead.packaged_model import SMOLLM2, ModelUnavailable
from fairlead.serve.model import ModelRefused, worker_config
from fairlead.serve.options import ServeOptions

SAMPLING = Path(__file__).with_name("smollm2")
"""Folder with the sampling defaults of SmolLM2's model card. Its GGUF file has none, and at temperature 1 it answers with nonsense."""


def with_model(options: ServeOptions, console: Console) -> ServeOptions:
    """Return `options` with a model: without MODEL it is SmolLM2, downloaded if necessary. Raises ModelRefused, and UserError for options.

    Wrong options are refused before the download.
    """
    if options.model and not options.model.startswith("-"):
        return options
    given = [*filter(None, [options.model]), *(options.flags or ())]  # the command line takes a first flag for MODEL
    if any(not word.startswith("-") and not after.startswith("-") for word, after in pairwise(given)):
        raise UserError(f"{given[0]}: give MODEL first, then the worker's flags: fairlead serve MODEL {given[0]} …")
    if options.runtime != "fairlead":
        raise UserError(f"--runtime {options.runtime}: give MODEL, because only Fairlead's worker has a default model")
    flags = ["--generation-config", str(SAMPLING), *given]
    found = replace(options, model=str(SMOLLM2.path), flags=flags)
    found.check()
    worker_config(SMOLLM2.path.as_uri(), options.port, flags)
    try:
        SMOLLM2.fetch(lambda line: console.print(line, markup=False, soft_wrap=True))
    except ModelUnavailable as error:
        raise ModelRefused(f"{error}, or name a model: fairlead serve MODEL") from None
    return found
