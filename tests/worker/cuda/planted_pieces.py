"""Faults of piecewise graphs that real engines have had, planted into the worker's code on the modelled device."""

import weakref
from typing import Any

from tests.worker.cuda.machine import Block
from tests.worker.cuda.planted import Patch, edit
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fairlead_worker.execution.cuda_graphs.piecewise import PiecewiseGraphs, _PieceContext


class Borrowed:
    """Memory of a block that it does not own."""

    def __init__(self, block: Block) -> None:
        self.block = block


def queries_in_the_pool(patch: Patch) -> None:
    """Attention reads queries in the graphs' pool through references that do not own them: sglang#37606, mended by sglang#37448."""

    def attend(self: Any, layer: int, query: Any, key: Any, value: Any) -> Any:
        output, run, mode = self.outputs[self.backend.spec.layers[layer]], self.run, _get_current_dispatch_mode()
        self.backend.store(layer, self.stores[0], key, value)
        borrowed, storage = Borrowed(query.handle.block), query.inner.untyped_storage()._cdata
        weak = mode._wrap(query.inner, borrowed)

        def between() -> None:
            mode._handles[storage] = weakref.ref(borrowed)
            run(layer, weak, output)

        self.cut(between)
        return output

    patch.setattr(_PieceContext, "attend", attend)


def fresh_output(patch: Patch) -> None:
    """Attention writes to new memory in each step, and the next piece reads that of the recording: vllm#37363, vllm#53915."""
    edit(patch, _PieceContext, "attend", ("run(layer, queries, output))", "run(layer, queries, output.clone()))"))


def attention_on_another_stream(patch: Patch) -> None:
    """Nothing waits for the attention between two pieces."""
    edit(
        patch,
        PiecewiseGraphs,
        "_attend",
        (
            "    self._backend.run_parts(",
            "    side = torch.cuda.Stream()\n"
            "    side.wait_stream(torch.cuda.current_stream())\n"
            "    with torch.cuda.stream(side):\n"
            "        self._backend.run_parts(",
        ),
    )


def padding_on_the_first_page(patch: Patch) -> None:
    """Padding writes its keys to a page that a request has: engines without a page for it, as vLLM's slot -1 and SGLang's slot 0 are."""
    edit(patch, PiecewiseGraphs, "_fill", ("memory, each.slots, self._padding", "memory, each.slots, 0"))
