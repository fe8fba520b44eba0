"""Building FlashInfer's kernels at startup: each is loaded or compiled, and run once on page 0."""

import logging
from typing import Protocol

import torch
from torch import Tensor

from fairlead_worker.kernels.base import GroupPages, KVSpec, LayerSpec, PackedStep, StepContext

logger = logging.getLogger(__name__)


class TrialStep(StepContext, Protocol):
    """A planned step that also stores without attending."""

    def store(self, layer: int, key: Tensor, value: Tensor) -> None: ...


class TriedBackend(Protocol):
    """What a trial needs of the backend."""

    spec: KVSpec

    @property
    def kinds(self) -> list[LayerSpec]: ...

    def begin(self, step: PackedStep, kind: LayerSpec | None = None) -> TrialStep:
        """Return the step, planned for layers of `kind`, or for none."""
        ...

    def leave_out(self, kind: LayerSpec, reason: str) -> None: ...


def build_store(backend: TriedBackend) -> bool:
    """Store the KV of a token. Return False, with a warning, if the kernel of float8 cannot be built."""
    kind = backend.kinds[0]
    token = _zeros(backend.spec, 1, kind.kv_heads, kind)
    try:
        backend.begin(trial_step(backend.spec, 1)).store(backend.spec.layers.index(kind), token, token)
        _wait(backend.spec.device)
    except Exception as error:  # whatever a compiler or a loader raises
        logger.warning("float8 KV is rounded by torch, with four more launches in a layer: %s", _reason(error))
        return False
    return True


def build_kind(backend: TriedBackend, kind: LayerSpec) -> None:
    """Run a layer of `kind` for a row of one token, and for one of two. The reference serves what cannot be built."""
    try:
        for count in (1, 2):
            _run(backend, kind, count)
    except Exception as error:  # as above
        backend.leave_out(kind, f"heads of {kind.key_dim} here, as its kernel could not be built: {_reason(error)}")


def build_fa3(backend: TriedBackend, kind: LayerSpec) -> bool:
    """Do the same for a row of two tokens by fa3. Return False, with a warning, if that fails."""
    try:
        _run(backend, kind, 2)
    except Exception as error:  # as above
        logger.warning("prefills of heads of %d use fa2, not fa3, whose kernel could not be built: %s", kind.key_dim, _reason(error))
        return False
    return True


def trial_step(spec: KVSpec, count: int) -> PackedStep:
    """Return a step of one row of `count` tokens on page 0."""
    device = spec.device
    pages = -(-count // spec.page_size)  # all of them page 0: there may be no other page
    table = GroupPages(torch.arange(count, device=device) % spec.page_size, torch.zeros(pages, dtype=torch.int32))
    return PackedStep(
        tokens=torch.zeros(count, dtype=torch.int64, device=device),
        positions=torch.arange(count, device=device),
        slots=table.slots,
        starts=[0],
        counts=[count],
        page_indptr=torch.tensor([0, pages], dtype=torch.int32),
        page_indices=table.page_indices,
        sampling=torch.zeros(0, dtype=torch.int64, device=device),
        others=[table] * (spec.num_groups - 1),
    )


def _run(backend: TriedBackend, kind: LayerSpec, count: int) -> None:
    spec = backend.spec
    parts = [_zeros(spec, count, heads, kind) for heads in (kind.heads, kind.kv_heads, kind.kv_heads)]
    backend.begin(trial_step(spec, count), kind).attend(spec.layers.index(kind), *parts)
    _wait(spec.device)


def _zeros(spec: KVSpec, tokens: int, heads: int, kind: LayerSpec) -> Tensor:
    return torch.zeros(tokens, heads, kind.key_dim, dtype=spec.dtype, device=spec.device)


def _wait(device: torch.device) -> None:
    """Wait for the device, which reports errors of a kernel only then."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reason(error: Exception) -> str:
    """Return one line of `error`: the first error of a compiler's output, else the last line."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    reason = next((line for line in lines if "error:" in line), lines[-1])
    return f"{type(error).__name__}: {reason.strip()[:300]}"
