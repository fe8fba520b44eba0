"""Budgets of a device: the tokens of a chunk by its speed, and KV pages, which get what remains beside weights and the largest step."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from fairlead_worker.scheduler.config import LEAST_CHUNK

CHUNK_SHARE = 1 / 16
"""Share of the memory beside the weights that the prompt tokens of a step take at most, so that a small GPU keeps room for KV."""
CHUNK_GAIN = 1.2
"""Times as fast that twice the chunk must prefill."""
LEAST_SPARE = 256 << 20
SPARE = 1 / 64
"""Share of the device's memory that always stays free, for fragmentation of the allocator and for libraries that allocate later."""

logger = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """A device's memory, as its driver and torch's allocator report it."""

    total: int
    """Bytes."""

    def free(self) -> int:
        """Return the free bytes, after torch's own cache is released."""
        ...

    def peak_of(self, run: Callable[[], None]) -> int:
        """Return the peak bytes of torch's allocator while `run` runs, above the current use. Raises torch.OutOfMemoryError."""
        ...


class CudaMemory:
    """Memory of a GPU."""

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
        # Reserved rather than allocated memory: fragmentation in service is no better than here.
        return int(torch.cuda.max_memory_reserved(self._device)) - before


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Return a GPU's memory; None for a CPU, whose memory is not measured."""
    return CudaMemory(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Result of a memory profile."""

    kv_bytes: int
    """For KV pages; may be less than one page takes."""
    step_tokens: int
    """Tokens of the largest step that fits."""
    step_bytes: int
    """Memory of that step besides weights and KV."""


def profile_memory(
    memory: DeviceMemory, fraction: float, tokens: int, least: int, attempt: Callable[[int], None], usual: int | None = None
) -> MemoryProfile:
    """Return the memory for KV on a device whose weights are loaded.

    fraction: the most that weights and KV pages may take of the device's memory (SGLang's --mem-fraction-static). They get less if a
    step needs more than the rest. `attempt(tokens)` runs the largest step of that many tokens and keeps nothing. If it runs out of
    memory, the next attempts are `usual`, a size that most steps stay within, then half as many each time, down to `least`.

    Raises MemoryError if not even those fit.
    """
    wanted = tokens
    while True:
        try:
            step_bytes = memory.peak_of(lambda: attempt(tokens))  # noqa: B023  # runs immediately
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


def choose_chunk(seconds_of: Callable[[int], float], limit: float, most: int) -> int:
    """Return the tokens of a chunk: `LEAST_CHUNK`, doubled as long as that lets the device prefill `CHUNK_GAIN` times as fast.

    A larger chunk delays decodes for nothing. seconds_of: runs a step of that many prompt tokens. limit: most seconds of a larger chunk.
    most: its most tokens.
    """
    chunk, seconds = LEAST_CHUNK, seconds_of(LEAST_CHUNK)
    while 2 * chunk <= most and (taken := seconds_of(2 * chunk)) <= min(limit, 2 * seconds / CHUNK_GAIN):
        chunk, seconds = 2 * chunk, taken
    return chunk


def largest_chunk(step_bytes: int, free: int, most: int) -> int:
    """Return the most tokens of a chunk that memory has room for: `LEAST_CHUNK`, doubled, up to `most`.

    step_bytes: what a step of `LEAST_CHUNK` prompt tokens takes of the `free` bytes beside the weights.
    """
    chunk = LEAST_CHUNK
    while 2 * chunk <= most and 2 * chunk * step_bytes <= CHUNK_SHARE * free * LEAST_CHUNK:
        chunk *= 2
    return chunk


def measure_allocation(memory: DeviceMemory, make: Callable[[], object]) -> int:
    """Return the bytes of device memory that the result of `make` holds; it is released again.

    Temporary memory of `make` must fit beside the weights alone, so it fits wherever the largest step does.
    """
    before = memory.free()
    made = make()
    held = before - memory.free()
    del made
    memory.free()
    return max(0, held)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
