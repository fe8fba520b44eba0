"""transformers without what only its own saving needs, and without looking for garbage while it is imported."""

import sys
from importlib import import_module

from fairlead_worker.imports import gc_frozen


def import_transformers() -> None:
    """transformers and torch, whose import is most of a start. Nothing is done where they were imported before."""
    if "transformers.modeling_utils" in sys.modules:
        return
    with gc_frozen():
        _without_torchao("transformers.quantizers.quantizer_torchao")
        import_module("transformers.modeling_utils")


def _without_torchao(quantizers: str) -> None:
    """Has transformers' quantizers imported without torchao, which takes 0.5 s of a core (2 s of a busy machine) and 50 MiB at every start.

    They import it with themselves for the one function with which they write checkpoints. For reading them, and for `--quantization`, they
    import it where they use it: then it is there again. Nothing is done where it was imported before, or is not installed.
    """
    if "torchao" in sys.modules:
        return
    sys.modules["torchao"] = None  # type: ignore[assignment]  # to the import system: a package that is not there
    try:
        import_module(quantizers)
    finally:
        del sys.modules["torchao"]
        import_module("transformers.utils.import_utils").is_torchao_available.cache_clear()
