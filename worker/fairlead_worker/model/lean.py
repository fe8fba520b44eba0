"""Fast import of transformers: without what the worker never runs of it, and without garbage collection during the import.

The rest is a third of the import (`python -X importtime`): torch's compiler, for decorators and a class that tell it what not to trace;
DTensor, for transformers' own tensor parallelism; flex attention; and torchao, for the writer of its checkpoints.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from fairlead_worker.platform.imports import gc_frozen

logger = logging.getLogger(__name__)

COMPILER = "torch._dynamo"
GETTER = f"{COMPILER}._trace_wrapped_higher_order_op"
DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")
"""What transformers takes of the compiler at its import. They mark functions for `torch.compile`, which the worker never applies to it."""
USED = ("transformers.modeling_utils", "transformers.generation.utils")
"""What every family's module imports."""
UNUSED = ("is_torch_distributed_available", "is_torch_flex_attn_available")
"""transformers' checks for what the worker has its own code for. They are False as long as the process lives."""


def import_transformers() -> None:
    """Import transformers and torch, which is most of a start. Does nothing if they are imported already."""
    if "transformers.modeling_utils" in sys.modules:
        return
    with gc_frozen():
        import_module("torch")
        try:
            with _compiler_replaced():
                _import_models()
        except (ImportError, AttributeError) as error:  # a release that takes more of the compiler
            logger.info("transformers is imported with torch's compiler: %s", error)
            _import_models()
    # Its own handler writes bare lines to stderr: they get the format of all others, which may be JSON.
    logs = import_module("transformers.utils.logging")
    logs.disable_default_handler()
    logs.enable_propagation()


def _import_models() -> None:
    for module in map(import_module, ("transformers.utils.import_utils", "transformers.utils")):
        for name in UNUSED:
            setattr(module, name, _is_unused)
    _without_torchao("transformers.quantizers.quantizer_torchao")
    for name in USED:
        import_module(name)


def _is_unused() -> bool:
    return False


@contextmanager
def _compiler_replaced() -> Iterator[None]:
    """Have modules in the place of torch's compiler, which takes a second to import. Does nothing if it is imported already."""
    if COMPILER in sys.modules:
        yield
        return
    compiler, getter = ModuleType(COMPILER), ModuleType(GETTER)
    for name in DECORATORS:
        setattr(compiler, name, _return_function)
    getter.TransformGetItemToIndex = _TransformGetItemToIndex  # type: ignore[attr-defined]
    torch: Any = sys.modules["torch"]
    sys.modules |= {COMPILER: compiler, GETTER: getter}
    torch._dynamo = compiler
    try:
        yield
    finally:
        del sys.modules[COMPILER], sys.modules[GETTER], torch._dynamo  # torch imports its own at the next use


def _return_function(function: Any = None, *_: Any, **__: Any) -> Any:
    """Replace a decorator, with and without arguments."""
    return _return_function if function is None else function


class _TransformGetItemToIndex:
    """Becomes the compiler's own class when an object is made: some masks of transformers need it."""

    def __new__(cls) -> Any:
        return import_module(GETTER).TransformGetItemToIndex()


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
