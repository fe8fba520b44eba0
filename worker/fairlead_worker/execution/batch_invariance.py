"""`--deterministic`: a row has the same bits alone, batched, in one chunk, in several chunks and token by token. Verified at startup."""

import logging
from dataclasses import replace

import torch

from fairlead_worker.execution.check import STEPS, trial_pages, trial_step, trial_steps
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.kernels.base import PackedStep
from fairlead_worker.kernels.flashinfer import FlashInferBackend

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
    spec, vocabulary = runner.backend.spec, runner.loaded.vocabulary_size
    if runner.backend.pages < trial_pages(spec.page_size):
        raise NotInvariant(
            f"--deterministic is verified on {trial_pages(spec.page_size)} pages at the start: set --kv-pages to at least that"
        )
    if (window := variable_window(runner)) is not None:
        raise NotInvariant(
            "--deterministic does not hold beyond this model's sliding window, where FlashInfer's sums depend on the chunk; "
            f"set --max-model-len to at most {window} (it is {runner.loaded.max_model_len}), or remove the flag"
        )
    together: dict[tuple[int, int], torch.Tensor] = {}
    for rows, step in zip(STEPS, trial_steps(spec, vocabulary), strict=True):
        places = [(request, at) for request, start, count in rows for at in range(start, start + count)]
        together |= dict(zip(places, _logits(runner, step), strict=True))
    lengths = {request: 1 + max(at for owner, at in together if owner == request) for request, _ in together}
    ways = {
        "in one chunk": [[(0, length)] for length in lengths.values()],
        "token by token": [[(at, 1) for at in range(length)] for length in lengths.values()],
    }
    for way, cuts in ways.items():
        for request, parts in zip(lengths, cuts, strict=True):
            for start, count in parts:
                alone = _logits(runner, trial_step(((request, start, count),), spec, vocabulary))
                for at, logits in enumerate(alone, start):
                    _compare(logits, together[request, at], f"alone and {way}, token {at} of {lengths[request]}")
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


def _logits(runner: ModelRunner, step: PackedStep) -> torch.Tensor:
    moved = {name: getattr(step, name).to(runner.loaded.device) for name in ("tokens", "positions", "slots", "sampling")}
    step = replace(step, **moved)
    return runner.forward(step, runner.backend.plan(step))


def _compare(alone: torch.Tensor, together: torch.Tensor, where: str) -> None:
    if not torch.equal(alone, together):
        worst = (alone.float() - together.float()).abs().max().item()
        raise NotInvariant(
            f"--deterministic does not hold here: {where}, has other logits than in a batch (by {worst:.1e}); "
            "remove the flag, or choose another --attention-backend or --dtype"
        )
