"""Faults of kinds that real engines have had, planted into the worker's code on the modelled device.

Each function takes a `MonkeyPatch`. Its docstring says where such a fault is known from.
"""

import inspect
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from fairlead_worker.execution import draft, host, overlap, stream
from fairlead_worker.execution.cuda_graphs import decodes as graphs
from fairlead_worker.execution.cuda_graphs.decodes import _Graph
from fairlead_worker.execution.cuda_graphs.recorder import CudaRecorder
from fairlead_worker.execution.host import CudaHostStore
from fairlead_worker.kernels import flashinfer, transfer
from fairlead_worker.kernels.flashinfer import FlashInferBackend

REPLAY = "        for step in steps:\n            step()\n"
"""What a replay does, in `CudaRecorder.record_pieces`."""
Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def edit(patch: Patch, owner: Any, name: str, *changes: tuple[str, str]) -> None:
    """Replace parts of the source of a function or method, each of which it has once."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}"
        source = source.replace(old, new)
    space = dict(function.__globals__)
    exec(source, space)
    patch.setattr(owner, name, space[name])


def load_is_not_awaited(patch: Patch) -> None:
    """Attention reads pages that are still on their way from the host: layer-wise loading in hierarchical caches (HiCache, LMCache)."""
    edit(patch, CudaHostStore, "_load", ("compute.wait_stream(self._in)", "pass"))


def save_starts_early(patch: Patch) -> None:
    """The copy to the host starts before the pages are gathered: offloading connectors with a stream of their own."""
    edit(patch, CudaHostStore, "_save", ("self._out.wait_stream(compute)", "pass"))


def event_on_the_wrong_stream(patch: Patch) -> None:
    """An event of the current stream instead of the copying one is complete too early: `event.record()` without its argument."""
    edit(patch, CudaHostStore, "_save", ("staging.emptied.record(self._out)", "staging.emptied.record()"))


def load_into_temporary_memory(patch: Patch) -> None:
    """Memory of one stream is freed while another still reads it: the reason for `Tensor.record_stream` in PyTorch's notes on CUDA."""

    def load(self: Any, group: Any) -> None:
        compute, (pages, slots) = torch.cuda.current_stream(), host._columns(group)
        with torch.cuda.stream(self._in):
            part = torch.empty_like(self._incoming.buffer[: len(group)])
            for place, slot in enumerate(slots.tolist()):
                part[place].copy_(self._records[slot], non_blocking=True)
        compute.wait_stream(self._in)
        self._backend.write_pages(transfer.to_device(pages, part.device), part)

    patch.setattr(CudaHostStore, "_load", load)


def host_tier_is_freed_early(patch: Patch) -> None:
    """Host memory is unpinned while copies are in flight: buffers that are freed at the end of a request or an engine."""
    edit(patch, host, "_pin", ("torch.cuda.synchronize()", "pass"))


def plan_is_staged_early(patch: Patch) -> None:
    """The next plan overwrites pinned memory that is still copied: overlapped schedulers on FlashInfer's plan, vLLM's input buffers before
    its `prepare_inputs_event`.
    """
    edit(patch, FlashInferBackend, "_stage", ("self._staged.synchronize()", "pass"))


def tokens_are_read_early(patch: Patch) -> None:
    """The host reads an asynchronous copy without waiting for it: sampled tokens of a `non_blocking` copy to the host."""
    edit(patch, transfer, "to_host", ("copied.synchronize()", "pass"))
    patch.setattr(stream, "to_host", transfer.to_host)


def replay_before_its_inputs(patch: Patch) -> None:
    """A graph is replayed on a stream that does not wait for the copies of its inputs."""
    edit(
        patch,
        CudaRecorder,
        "record_pieces",
        (REPLAY, "        with torch.cuda.stream(side):\n            [step() for step in steps]\n        compute.wait_stream(side)\n"),
    )


def result_is_not_awaited(patch: Patch) -> None:
    """Sampling reads the logits of a replay on another stream without waiting for it."""
    edit(
        patch,
        CudaRecorder,
        "record_pieces",
        (REPLAY, "        side.wait_stream(compute)\n        with torch.cuda.stream(side):\n            [step() for step in steps]\n"),
    )


def graph_reads_freed_memory(patch: Patch) -> None:
    """An input of a graph is replaced by a new tensor, and replays read the old address: the commonest fault of CUDA graphs in PyTorch."""
    record = _Graph.record

    def record_and_replace(self: Any, *args: Any) -> Any:
        recorded = record(self, *args)
        self._inputs = replace(self._inputs, tokens=self._inputs.tokens.clone())
        return recorded

    patch.setattr(_Graph, "record", record_and_replace)


def eager_work_in_the_pool(patch: Patch) -> None:
    """Eager tensors get memory of the graphs' pool, which replays overwrite: `use_mem_pool` around more than the capture."""
    record = CudaRecorder.record

    def record_in_pool(self: Any, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        replay = record(self, run)
        torch._C._cuda_beginAllocateCurrentStreamToPool(0, self._pool)
        return replay

    patch.setattr(CudaRecorder, "record", record_in_pool)


def drafted_token_on_another_stream(patch: Patch) -> None:
    """A drafted token is copied to the next pass on a stream of its own: draft loops that prepare inputs beside it (EAGLE workers)."""
    edit(
        patch,
        draft.Drafter,
        "_choose",
        (
            "        step.tokens.copy_(drafted)\n",
            "        with torch.cuda.stream(torch.cuda.Stream()):\n            step.tokens.copy_(drafted)\n",
        ),
    )


def drafts_are_read_early(patch: Patch) -> None:
    """The host takes the draft tokens from pinned memory before their copy completes: a `non_blocking` copy without its event."""
    edit(patch, transfer, "to_host", ("copied.synchronize()", "pass"))
    patch.setattr(draft, "to_host", transfer.to_host)


def pageable_copies(patch: Patch) -> None:
    """Small arrays are copied from pageable memory, so that the host waits for the device in each step."""
    for module in (flashinfer, graphs, host, overlap):
        patch.setattr(module, "to_device", lambda values, device, dtype=None: torch.as_tensor(values, dtype=dtype).to(device))


def pool_of_a_failed_capture(patch: Patch) -> None:
    """The pool of a failed capture stays in use: pytorch#180395."""
    patch.setattr(CudaRecorder, "_replace_pool", lambda self: None)


def work_of_a_failed_warm_up(patch: Patch) -> None:
    """Eager steps do not wait for what a failed warm-up left on the side stream, and use the same workspace."""
    edit(patch, CudaRecorder, "_replace_pool", ("torch.cuda.synchronize()", "pass"))


def stream_of_a_failed_capture(patch: Patch) -> None:
    """After a failed capture its stream stays current: `torch.cuda.graph` in releases before pytorch#180395."""
    edit(patch, CudaRecorder, "record_pieces", ("with torch.cuda.stream(side):", "with suppress():"))


def event_of_another_stream_in_a_capture(patch: Patch) -> None:
    """A kernel of the capture waits for work outside it, which CUDA refuses: a copy stream shared by eager steps and graphs."""
    attend = _Graph.attend

    def waiting(self: Any, *args: Any) -> torch.Tensor:
        with suppress(AttributeError):
            torch.cuda.current_stream().wait_event(self._outside)
        self._outside = torch.cuda.Stream().record_event()  # type: ignore[no-untyped-call]  # torch
        return attend(self, *args)

    patch.setattr(_Graph, "attend", waiting)


def unjoined_stream_in_a_capture(patch: Patch) -> None:
    """A second stream joins the capture and nothing waits for it at the end."""
    attend = _Graph.attend

    def forking(self: Any, layer: int, query: torch.Tensor, *args: Any) -> torch.Tensor:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            query + 1
        return attend(self, layer, query, *args)

    patch.setattr(_Graph, "attend", forking)
