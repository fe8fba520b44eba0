"""How much of a device's memory its KV pages get: what is left when the weights are there and the largest step is running."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

LEAST_SPARE = 256 << 20
SPARE = 1 / 64
"""Of the device's memory, kept free at least: what the allocator cannot use for its being in pieces, and libraries take later on."""

logger = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """A device's memory, as its driver and torch's allocator tell it."""

    total: int
    """Bytes."""

    def free(self) -> int:
        """Bytes that nobody has, torch's own cache given back first."""
        ...

    def peak_of(self, run: Callable[[], None]) -> int:
        """Bytes that torch's allocator holds at most while `run` runs, above what is in use now. Raises torch.OutOfMemoryError."""
        ...


class CudaMemory:
    """Of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        _, self.total = torch.cuda.mem_get_info(device)

    def free(self) -> int:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def peak_of(self, run: Callable[[], None]) -> int:
        self.free()
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        # What was reserved and not what was allocated: in service the pieces lie no better than here.
        return int(torch.cuda.max_memory_reserved(self._device)) - before


def memory_of(device: torch.device) -> DeviceMemory | None:
    """A GPU's; None of a CPU, whose memory is not measured."""
    return CudaMemory(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What came of a profile."""

    kv_bytes: int
    """For KV pages; may be less than one takes."""
    step_tokens: int
    """Tokens of the largest step that fits."""
    step_bytes: int
    """What it takes besides weights and KV."""


def profile_memory(
    memory: DeviceMemory, fraction: float, tokens: int, least: int, attempt: Callable[[int], None], usual: int | None = None
) -> MemoryProfile:
    """The room for KV on a device whose weights are loaded.

    fraction: of the device's memory, for weights and KV pages together at most (SGLang's --mem-fraction-static). Less where a step needs
    more than the rest of it. `attempt(tokens)` runs the worst step of that many tokens and keeps nothing; where it finds no memory, `usual`
    are tried, which most steps keep to, and then half as many, down to `least`.

    Raises MemoryError where not even those fit.
    """
    wanted = tokens
    while True:
        try:
            step_bytes = memory.peak_of(lambda: attempt(tokens))  # noqa: B023  # runs at once
            break
        except torch.OutOfMemoryError as error:
            if tokens <= least:
                raise MemoryError(
                    f"a step of {tokens} tokens does not fit beside the weights: {_gib(memory.free())} of {_gib(memory.total)} are free; "
                    "lower --max-num-seqs or --max-model-len, or take a larger device"
                ) from error
            tokens = usual if usual is not None and usual < tokens else max(least, tokens // 2)
    free = memory.free()
    spare = max(LEAST_SPARE, int(memory.total * SPARE))
    room = min(free - step_bytes - spare, free - int(memory.total * (1 - fraction)))
    if tokens < wanted:
        logger.warning("a step of %d tokens does not fit into memory: steps are kept to %d", wanted, tokens)
    logger.info(
        "memory: %s of %s free with the weights loaded; a step of %d tokens takes %s; %s for KV pages",
        _gib(free),
        _gib(memory.total),
        tokens,
        _gib(step_bytes),
        _gib(max(0, room)),
    )
    return MemoryProfile(max(0, room), tokens, step_bytes)


def measure_allocation(memory: DeviceMemory, make: Callable[[], object]) -> int:
    """Bytes of the device that what `make` makes holds for as long as it is there; it is given back. What else it needed meanwhile must fit
    beside the weights alone, and so fits wherever the largest step does."""
    before = memory.free()
    made = make()
    held = before - memory.free()
    del made
    memory.free()
    logger.info("memory: CUDA graphs take %s", _gib(max(0, held)))
    return max(0, held)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
