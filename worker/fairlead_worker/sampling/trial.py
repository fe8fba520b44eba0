"""Compile the fused sampler at the start, and compare its choices with torch's."""

import logging
from array import array
from typing import Any

import torch

from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.sampling.fused import FusedSampler, Launch
from fairlead_worker.sampling.sampler import choose
from fairlead_worker.scheduler.request import Request

SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "logit_bias": ((1, 2.0),)},
    {"top_k": 20, "top_p": 0.9},
    {"top_p": 0.9, "temperature": 1.5},
    {"min_p": 0.1, "repetition_penalty": 1.5, "frequency_penalty": 0.2},
    {"allowed_token_ids": (3, 5, 7)},
)

logger = logging.getLogger(__name__)


def make_fused_sampler(device: torch.device, vocabulary: int, dtype: torch.dtype) -> FusedSampler | None:
    """Return the sampler for logits [rows, vocabulary] of `dtype`, compiled.

    None on a CPU, and, with the reason in the log, where the kernel does not run or chooses other tokens than torch.
    """
    if device.type != "cuda":
        return None
    try:
        sampler = FusedSampler(load_launch())
        reason = find_difference(sampler, device, vocabulary, dtype)
    except Exception as error:  # Triton raises its own kinds; it also needs a C compiler, or a driver that was compiled before
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if reason:
        logger.warning("sampling uses torch instead of its Triton kernel, which is slower: %s", reason)
        return None
    return sampler


def load_launch() -> Launch:
    """Return the kernel. Raises what Triton raises where it is not installed."""
    from fairlead_worker.sampling.kernel import launch

    return launch


def find_difference(sampler: FusedSampler, device: torch.device, vocabulary: int, dtype: torch.dtype) -> str:
    """Return what the kernel does differently from torch; empty if nothing.

    The likely logits of a row differ, because of equal ones torch keeps any.
    """
    places = torch.arange(vocabulary)
    logits = torch.stack([-(places * step % vocabulary) / 64 for step in (1, vocabulary - 1, 7919) for _ in SETTINGS]).to(dtype)
    settings = [Sampling(max_tokens=1, **setting) for setting in SETTINGS] * 3
    requests = [Request(Submit(str(row), b"", each, 0), array("I", range(4)), 2, row) for row, each in enumerate(settings)]
    there = logits.to(device, copy=True)
    tokens = sampler.choose(there, requests, (), None).cpu()
    if not torch.equal(there.cpu(), logits):
        return "it does not leave the logits as they were"
    different = tokens != choose(logits, requests)
    greedy = torch.tensor([each.temperature == 0 for each in settings])
    # A number of the noise may be within the last bits of a border between two tokens; without noise there is none.
    is_wrong = int(different.sum()) > 1 or bool(different[greedy].any())
    return f"{int(different.sum())} of {len(tokens)} tokens are others" if is_wrong else ""
