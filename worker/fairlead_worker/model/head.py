"""The head of a model apart from its body: logits of a few positions at a time, so that [tokens, vocabulary] is never allocated.

A family's own changes to its logits (softcaps, scales) are preserved: the head is the model's own forward, run on a recorded output
of the body.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fairlead_worker.model.acceptance import close
from fairlead_worker.model.attention import ATTENTION
from fairlead_worker.model.trial import SelfAttention


class Head:
    """The model without `body`, the module whose output its forward turns into logits."""

    def __init__(self, model: PreTrainedModel, body: nn.Module) -> None:
        self._model = model
        self._body = body

    @contextmanager
    def record(self) -> Iterator[list[Any]]:
        """Append the body's outputs to the returned list while the context is open."""
        answers: list[Any] = []
        hook = self._body.register_forward_hook(lambda module, inputs, answer: answers.append(answer))
        try:
            yield answers
        finally:
            hook.remove()

    def logits(self, answer: Any, positions: torch.Tensor) -> torch.Tensor:
        """Return logits [positions, vocabulary] from the body's `answer` for [1, T] tokens, at `positions` ([n] int64)."""
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=positions.device)
        self._body.forward = lambda *args, **kwargs: answer  # restored after this call
        try:
            logits: torch.Tensor = self._model(input_ids=nothing, position_ids=nothing, use_cache=False, logits_to_keep=positions).logits[0]
        finally:
            del self._body.forward
        return logits


@torch.inference_mode()
def find_head(model: PreTrainedModel) -> Head | None:
    """Return the head of `model`; None if no candidate reproduces the model's own logits for a few tokens."""
    tokens = torch.arange(5, device=model.device)[None]
    candidates = [body for body in (model.base_model, model.get_decoder()) if body is not model]
    model.set_attn_implementation(ATTENTION)
    try:
        for body in candidates:
            head = Head(model, body)
            with head.record() as answers:
                whole = model(input_ids=tokens, position_ids=tokens, use_cache=False, step=SelfAttention()).logits[0]
            if len(answers) == 1 and close(head.logits(answers[0], torch.tensor([3, 1], device=model.device)), whole[[3, 1]]):
                return head
    except (AttributeError, TypeError, IndexError, RuntimeError):  # its forward has another structure
        return None
    return None
