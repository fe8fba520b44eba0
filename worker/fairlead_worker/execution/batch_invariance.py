"""`--deterministic`: a row has the same bits alone, batched, in one chunk, in several chunks and token by token. Verified at startup."""

import logging
from collections.abc import Sequence

import torch

from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.kernels.groups import spread
from fairlead_worker.model.trial_text import LENGTHS, STEPS, places, trial_pages

logger = logging.getLogger(__name__)


class NotInvariant(Exception):
    """`--deterministic` cannot be guaranteed here; the message says where it fails and what to do."""


def configure_torch(device: torch.device) -> None:
    """Set torch's own switches for this process. A CPU needs none: packed layers and attention are batch invariant there."""
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it would write all scratch memory
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


@torch.inference_mode()
def check_invariance(runner: ModelRunner) -> None:
    """Compare the logits of three requests bit by bit. Writes the first pages of the runner's KV. Raises NotInvariant."""
    spec = runner.backend.spec
    if runner.backend.pages < trial_pages(spec.page_size) * spec.num_groups:
        raise NotInvariant(
            f"--deterministic is verified on {trial_pages(spec.page_size)} pages at the start: set --kv-pages to at least that"
        )
    if (window := variable_window(runner)) is not None:
        raise NotInvariant(
            "--deterministic does not hold beyond this model's sliding window, where FlashInfer's sums depend on the chunk; "
            f"set --max-model-len to at most {window} (it is {runner.loaded.max_model_len}), or remove the flag"
        )
    together: dict[int, torch.Tensor] = {}
    for rows in STEPS:
        together |= dict(zip(places(rows).tolist(), _logits(runner, rows), strict=True))
    for text, length in enumerate(LENGTHS):
        for way, cuts in (("in one chunk", [(0, length)]), ("token by token", [(at, 1) for at in range(length)])):
            for start, count in cuts:
                alone = ((text, start, count),)
                for at, place, logits in zip(range(start, length), places(alone).tolist(), _logits(runner, alone), strict=False):
                    _compare(logits, together[place], f"alone and {way}, token {at} of {length}")
    logger.info("deterministic: %d tokens have the same logits alone, batched, in one chunk and token by token, bit for bit", len(together))


def variable_window(runner: ModelRunner) -> int | None:
    """Return the shortest sliding window that a request can exceed in FlashInfer's kernels. None if there is none.

    The paged kernel starts its tiles of keys where the window of a tile's first query starts (`kv_start_idx` in prefill.cuh, 0.7.2). So
    sums beyond the window are grouped by where a chunk begins. The trial is too short to show it.
    """
    if not isinstance(runner.backend, FlashInferBackend):
        return None
    windows = [kind.window for kind in runner.backend.kinds if kind.window is not None]
    return min([window for window in windows if window < runner.loaded.max_model_len], default=None)


def _logits(runner: ModelRunner, rows: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    spec = runner.backend.spec
    step = spread(runner.loaded.reference.text.step(rows, spec.page_size, runner.loaded.device), spec)
    return runner.forward(step, runner.backend.plan(step))


def _compare(alone: torch.Tensor, together: torch.Tensor, where: str) -> None:
    if not torch.equal(alone, together):
        worst = (alone.float() - together.float()).abs().max().item()
        raise NotInvariant(
            f"--deterministic does not hold here: {where}, has other logits than in a batch (by {worst:.1e}); "
            "remove the flag, or choose another --attention-backend or --dtype"
        )
