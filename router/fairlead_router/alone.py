"""Choosing without the index: by what each worker last said of itself, and by our own requests there that have no answer yet."""

import os
from array import array
from collections.abc import Sequence
from time import monotonic

from fairlead_index.hashing import hash_bytes
from fairlead_index.score import ScoredWorker, best_starts
from fairlead_router.policies import Wanted
from fairlead_router.workers import Worker

HOME_TOKENS = 1024
"""How much of a prompt names its two homes: more than most system prompts, which all have in common, less than most conversations."""


def soonest_alone(wanted: Wanted, workers: Sequence[Worker]) -> Worker:
    """The worker that should start the prompt soonest, one of the two that its beginning names where they are nearly as soon."""
    home = home_block(wanted.hashes, wanted.prompt_tokens)
    scored = [scored_alone(worker, 1) for worker in workers]
    best = best_starts(scored, hash_bytes(home), wanted.prompt_tokens, os.urandom(8), 1)[0]
    return next(worker for worker in workers if worker.address == best.address)


def home_block(hashes: Sequence[int], prompt_tokens: int) -> "array[int]":
    """The block that stands for the whole prompt; none for a prompt without blocks."""
    if not len(hashes):
        return array("Q")
    block_tokens = max(1, prompt_tokens // len(hashes))  # or a little more
    return array("Q", [hashes[min(len(hashes), -(-HOME_TOKENS // block_tokens)) - 1]])


def scored_alone(worker: Worker, block_tokens: int) -> ScoredWorker:
    """What is waiting there is what it said, less what it has done since, or what we know to have sent it: whichever is more."""
    load = worker.load
    backlog = max(0.0, load.backlog_tokens - load.prefill_rate * (monotonic() - worker.load_at))
    return ScoredWorker(
        address=worker.address,
        block_tokens=block_tokens,
        owed=max(0.0, worker.pending_tokens - backlog),
        backlog=backlog,
        rate=load.prefill_rate,
        step=load.step_seconds,
        pages_free=load.pages_free,
        pages_total=load.pages_total,
        page_size=load.page_size,
    )
