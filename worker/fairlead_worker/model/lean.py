"""Fast import of transformers: without what only its checkpoint writer needs, and without garbage collection during the import."""

import sys
from importlib import import_module

from fairlead_worker.platform.imports import gc_frozen


def import_transformers() -> None:
    """Import transformers and torch, which is most of a start. Does nothing if they are imported already."""
    if "transformers.modeling_utils" in sys.modules:
        return
    with gc_frozen():
        _without_torchao("transformers.quantizers.quantizer_torchao")
        import_module("transformers.modeling_utils")
    # Its own handler writes bare lines to stderr: they get the format of all others, which may be JSON.
    logs = import_module("transformers.utils.logging")
    logs.disable_default_handler()
    logs.enable_propagation()


def _without_torchao(quantizers: str) -> None:
    """Import transformers' quantizers without torchao, which takes 0.5 s of a core (2 s on a busy machine) and 50 MiB at every start.

    The quantizers import torchao at their top for a single function that writes checkpoints. To read checkpoints, and for
    `--quantization`, they import it where they use it; that still works. Does nothing if torchao is imported already or not
    installed.
    """
    if "torchao" in sys.modules:
        return
    sys.modules["torchao"] = None  # type: ignore[assignment]  # the import system reads None as a missing package
    try:
        import_module(quantizers)
    finally:
        del sys.modules["torchao"]
        import_module("transformers.utils.import_utils").is_torchao_available.cache_clear()
