"""The last logits and the last page of complete prompts, on the device: what `cache/kept.py` counts.

A slot takes `KVSpec.page_bytes` and a row of logits: 2.3 MiB for an 8B model with pages of 16 tokens (2 MiB of KV, and 128,256 logits in 16
bits). Copies are queued on the stream of the forward pass, so no step waits for them.
"""

from collections.abc import Callable, Sequence

import torch

from fairlead_worker.execution.host import STAGING_BYTES
from fairlead_worker.kernels.base import Backend
from fairlead_worker.kernels.transfer import to_device
from fairlead_worker.scheduler.plan import Row, StepPlan

Complete = Callable[[torch.Tensor | None], torch.Tensor]
"""Takes the logits of the rows that a step computed, None without any, and returns those of all sampling rows."""


def return_logits(logits: torch.Tensor | None) -> torch.Tensor:
    """Complete a step that keeps and repeats nothing."""
    assert logits is not None, "a plan with rows has logits or repeats"
    return logits


def slot_bytes(page_bytes: int, vocabulary: int) -> int:
    """Return the most bytes of a slot: logits may have 32 bits."""
    return page_bytes + 4 * vocabulary


class KeptLogits:
    """The slots. Memory for pages is taken at once, that for logits at the first one, because their dtype is known then."""

    def __init__(self, slots: int, backend: Backend) -> None:
        self.slots = slots
        self._backend, self._device = backend, backend.spec.device
        self._block = max(1, STAGING_BYTES // backend.spec.page_bytes)
        """Most pages that are copied at once: the memory profile does not include copies for a step of many repeats."""
        page = backend.read_pages(torch.zeros(1, dtype=torch.int64, device=self._device))
        self._pages = page.new_empty(slots, page.shape[1])
        self._logits = torch.empty(0, 0)

    def prepare(self, plan: StepPlan) -> Complete:
        """Return a function that completes the logits of `plan`. It does not read the rows, which change after the launch of a step."""
        keeping, repeating, order, computed = list[tuple[Row, int]](), list[Row](), list[int](), 0
        for row in plan.rows:
            if not row.count:
                order.append(-len(repeating) - 1)
                repeating.append(row)
            elif row.samples:
                width = 1 + len(row.draft)
                order.extend(range(computed, computed + width))
                computed += width
                if row.slot >= 0:
                    keeping.append((row, computed - 1))
        if not keeping and not repeating:
            return return_logits
        order = [place if place >= 0 else computed - place - 1 for place in order]
        size = self._backend.spec.page_size
        keep = self._to_device([row.slot for row, _ in keeping], [row.pages[(row.end - 1) // size] for row, _ in keeping])
        (kept_at,) = self._to_device([place for _, place in keeping])
        repeat = self._to_device([row.slot for row in repeating], [row.pages[(row.end - 1) // size] for row in repeating])
        (places,) = self._to_device(order)

        def complete(logits: torch.Tensor | None) -> torch.Tensor:
            if logits is not None and keeping:
                self._keep(logits[kept_at], *keep)
            if not repeating:
                return return_logits(logits)
            slots, pages = repeat
            for some, into in zip(torch.split(slots, self._block), torch.split(pages, self._block), strict=True):
                self._backend.write_pages(into, self._pages[some])
            kept = self._logits[slots]
            return kept if logits is None else torch.cat((logits, kept))[places]

        return complete

    def _keep(self, logits: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor) -> None:
        if not self._logits.numel():
            self._logits = logits.new_empty(self.slots, logits.shape[1])
        # The native decoder has 32 bits, and the modules of a LoRA adapter 16: the wider dtype holds both exactly.
        wider = torch.promote_types(self._logits.dtype, logits.dtype)
        self._logits = self._logits.to(wider)
        self._logits.index_copy_(0, slots, logits.to(wider))
        for some, of in zip(torch.split(slots, self._block), torch.split(pages, self._block), strict=True):
            self._pages.index_copy_(0, some, self._backend.read_pages(of))

    def _to_device(self, *parts: Sequence[int]) -> list[torch.Tensor]:
        return [to_device(part, self._device, torch.int64) for part in parts]
