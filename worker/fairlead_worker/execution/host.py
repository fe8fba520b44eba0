"""The host tier's KV: one record for each host slot, and the copies between records and device pages.

`cache/host.py` decides which page goes to which slot; a plan carries the decision as data. All saves of a plan precede its loads, all
loads precede its forward pass, and no slot or page is written twice. So the saves run as one batch, and so do the loads.
"""

import logging
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fairlead_worker.kernels.base import Backend, make_zeros
from fairlead_worker.kernels.transfer import to_device

STAGING_BYTES = 64 << 20
"""Device memory of each of the two staging buffers. At 50 GB/s it holds more than a millisecond of copying, which hides the cost of
starting a copy."""

logger = logging.getLogger(__name__)

Copies = Sequence[tuple[int, int]]
"""(device page, host slot) pairs."""


class HostStore(Protocol):
    """Executor of a plan's copies."""

    slots: int

    def copy(self, saves: Copies, loads: Copies) -> None:
        """Order the copies so that later device work sees the loads done and may overwrite saved pages."""
        ...


class PlainHostStore:
    """Synchronous copies, complete when `copy` returns. For tests of the tier on a CPU."""

    def __init__(self, backend: Backend, slots: int) -> None:
        self.slots = slots
        self._backend = backend
        self._records = host_records(backend, slots)

    def copy(self, saves: Copies, loads: Copies) -> None:
        device = self._backend.spec.device
        if saves:
            pages, slots = _columns(saves)
            self._records.index_copy_(0, slots, self._backend.read_pages(pages.to(device)).cpu())
        if loads:
            pages, slots = _columns(loads)
            self._backend.write_pages(pages.to(device), self._records.index_select(0, slots).to(device))


class CudaHostStore:
    """Copies beside the computation: pinned records, and one stream and one staging buffer for each direction.

    A save gathers its pages into staging on the compute stream, so that the step may overwrite them immediately, and moves to the host
    while the step runs. A load arrives in staging, and the compute stream waits for it. A slot is read after the save that wrote it and
    written after the load that read it. A staging buffer is refilled after an event marks it empty.
    """

    def __init__(self, backend: Backend, slots: int) -> None:
        spec = backend.spec
        self.slots = slots
        self._backend = backend
        self._records = host_records(backend, slots)
        _pin(self, self._records)
        self._out = torch.cuda.Stream(spec.device)  # type: ignore[no-untyped-call]  # torch
        self._in = torch.cuda.Stream(spec.device)  # type: ignore[no-untyped-call]  # torch
        self._outgoing, self._incoming = _Staging(backend), _Staging(backend)

    def copy(self, saves: Copies, loads: Copies) -> None:
        written = self._out.record_event()  # by the saves of earlier plans
        for group in self._outgoing.groups(saves):
            self._save(group)
        if loads:
            fresh = {slot for _, slot in saves}
            if any(slot in fresh for _, slot in loads):
                written = self._out.record_event()
            self._in.wait_event(written)
        for group in self._incoming.groups(loads):
            self._load(group)

    def _save(self, group: Copies) -> None:
        staging, compute = self._outgoing, torch.cuda.current_stream(self._backend.spec.device)
        pages, slots = _columns(group)
        part = staging.buffer[: len(group)]
        compute.wait_event(staging.emptied)
        part.copy_(self._backend.read_pages(to_device(pages, part.device)))
        self._out.wait_stream(compute)
        self._out.wait_stream(self._in)
        with torch.cuda.stream(self._out):
            for place, slot in enumerate(slots.tolist()):
                self._records[slot].copy_(part[place], non_blocking=True)
        staging.emptied.record(self._out)

    def _load(self, group: Copies) -> None:
        staging, compute = self._incoming, torch.cuda.current_stream(self._backend.spec.device)
        pages, slots = _columns(group)
        part = staging.buffer[: len(group)]
        self._in.wait_event(staging.emptied)
        with torch.cuda.stream(self._in):
            for place, slot in enumerate(slots.tolist()):
                part[place].copy_(self._records[slot], non_blocking=True)
        compute.wait_stream(self._in)
        self._backend.write_pages(to_device(pages, part.device), part)
        staging.emptied.record(compute)


class _Staging:
    """Device buffer for as many pages as `STAGING_BYTES` hold, with an event for when it was last emptied."""

    def __init__(self, backend: Backend) -> None:
        spec = backend.spec
        self._pages = max(1, STAGING_BYTES // spec.page_bytes)
        self.buffer = torch.empty(self._pages, spec.page_width, dtype=spec.copy_dtype, device=spec.device)
        self.emptied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch

    def groups(self, copies: Copies) -> list[Copies]:
        return [copies[i : i + self._pages] for i in range(0, len(copies), self._pages)]


def _pin(owner: object, records: torch.Tensor) -> None:
    """Pin `records` until `owner` is collected.

    Freeing memory while it is pinned hands its physical pages to new allocations, and the device would write into the wrong pages.
    `pin_memory=True` is not used, because it rounds the size up to a power of two.
    """
    library: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch
    if status := int(library.cudaHostRegister(records.data_ptr(), records.nbytes, 0)):
        raise RuntimeError(f"the {records.nbytes} bytes of the host tier could not be pinned (CUDA error {status})")

    def unpin(kept: torch.Tensor) -> None:
        torch.cuda.synchronize()  # copies may be in flight
        library.cudaHostUnregister(kept.data_ptr())

    weakref.finalize(owner, unpin, records).atexit = False  # the kernel frees the pages when the process exits


def host_records(backend: Backend, slots: int) -> torch.Tensor:
    """Return [slots, page_width]: all layers of a page side by side, so that a page is one copy."""
    spec = backend.spec
    return make_zeros(slots, spec.page_width, dtype=spec.copy_dtype, device=torch.device("cpu"))


def make_host_store(backend: Backend, memory: int) -> HostStore | None:
    """Make the host tier of `memory` bytes. Returns None for 0, and, with a warning, where the device is the host.

    Raises ValueError if no page fits.
    """
    spec = backend.spec
    if not memory:
        return None
    if spec.device.type == "cpu":
        logger.warning(
            "--host-kv-cache-bytes %d is ignored: on a CPU the KV cache is in the host's memory; use --kv-cache-memory-bytes",
            memory,
        )
        return None
    slots = spec.pages_for(memory)
    if slots < 1:
        raise ValueError(f"--host-kv-cache-bytes {memory} holds no page: one of {spec.page_size} tokens takes {spec.page_bytes} bytes")
    return CudaHostStore(backend, slots)


def _columns(copies: Copies) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pages and slots, [n] int64 each, on the CPU."""
    table = torch.tensor(copies, dtype=torch.int64)
    return table[:, 0], table[:, 1]
