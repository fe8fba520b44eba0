"""Memory profile: run the largest step that can be planned before anything is served."""

from array import array
from collections.abc import Callable
from dataclasses import replace

import torch

from fairlead_worker.execution.draft import CATCH_UP
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.sampling.filters import WIDE
from fairlead_worker.sampling.fused import FusedSampler
from fairlead_worker.sampling.sampler import sample
from fairlead_worker.scheduler.limits import StepLimits
from fairlead_worker.scheduler.plan import Row, StepPlan
from fairlead_worker.scheduler.request import Request

COSTLIEST_SAMPLING = Sampling(
    max_tokens=1,
    temperature=1.0,
    top_k=WIDE + 1,
    top_p=0.999,
    min_p=1e-6,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    logprobs=20,
    seed=1,
)
"""A setting for everything whose memory grows with the vocabulary. With this top_k torch sorts the vocabulary whatever the logits are,
which takes more than the other ways to filter it."""


PROMPT = 8192
"""Tokens of the prompt whose chunks are timed. In its middle all sizes have the same attention for each token."""


def largest_plan(limits: StepLimits, page_size: int, adapter: int = 0) -> StepPlan:
    """Return the largest plan: decodes at the end of the longest sequence, and a chunk that ends there.

    Every row samples, and all but the first have `adapter`. All pages of a row are page 0: the result is meaningless, but the step
    takes the memory of a real one with a single page of KV.
    """
    context = limits.context
    text = array("I", bytes(4 * context))
    pages = array("i", bytes(4 * -(-context // page_size)))

    def row(number: int, count: int) -> Row:
        submit = Submit(str(number), b"", COSTLIEST_SAMPLING, 0, adapter=adapter if number else 0)
        request = Request(submit, text, context, number)
        return Row(request, context - count, count, pages, True)

    chunks, left = [], limits.prefill
    while left > 0:  # several prompts if one is shorter than a step
        chunks.append(min(left, context))
        left -= chunks[-1]
    rows = [row(number, 1) for number in range(limits.decode)]
    rows += [row(limits.decode + number, count) for number, count in enumerate(chunks)]
    return StepPlan(rows, prefill_tokens=limits.prefill, decodes=limits.decode, samples=len(rows))


def middle_plan(tokens: int, context: int, page_size: int) -> StepPlan:
    """Return a step with `tokens` in the middle of a prompt of `PROMPT`, or at the end of `context`, if that is shorter."""
    return largest_plan(StepLimits(tokens, 0, min(context, (PROMPT + tokens) // 2)), page_size)


def run_largest_step(
    limits: StepLimits,
    page_size: int,
    logits_of: Callable[[StepPlan], torch.Tensor],
    adapter: int = 0,
    fused: FusedSampler | None = None,
) -> None:
    """Run the forward pass of the largest plan and sample its tokens in the costliest way. Raises torch.OutOfMemoryError."""
    plan = largest_plan(limits, page_size, adapter)
    sample_costliest(logits_of(plan), fused)


def sample_costliest(logits: torch.Tensor, fused: FusedSampler | None = None) -> None:
    """Sample a token of each row of logits [rows, vocabulary] in the way that takes most memory."""
    submit = Submit("", b"", COSTLIEST_SAMPLING, 0)
    sample(logits, [Request(submit, array("I", [0, 1]), 1, number) for number in range(len(logits))], fused=fused)


def run_largest_draft(limits: StepLimits, requests: int, page_size: int, logits_of: Callable[[StepPlan], torch.Tensor]) -> None:
    """Run the largest pass of a draft model: the prompts of a step, a token of each of `requests`, and `CATCH_UP` tokens besides.

    Raises torch.OutOfMemoryError.
    """
    logits_of(largest_plan(replace(limits, prefill=limits.prefill + CATCH_UP, decode=requests), page_size)).argmax(1)
