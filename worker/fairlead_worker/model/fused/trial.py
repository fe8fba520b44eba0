"""Trial pass: a few tokens through a model, for its logits, queries and keys. Compares a model with itself before a change."""

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from fairlead_worker.model.attention import ATTENTION
from fairlead_worker.model.trial_text import TrialText

TRIAL = "fairlead-trial"


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, *, step: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    """Let each token attend to itself only; record queries and keys."""
    step += [query[0].transpose(0, 1).flatten(1).clone(), key[0].transpose(0, 1).flatten(1).clone()]
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


AttentionInterface.register(TRIAL, _attend)


@torch.inference_mode()
def trial(model: PreTrainedModel, limit: int, text: TrialText) -> list[torch.Tensor]:
    """Return logits [5, vocabulary], then queries and keys [5, heads * dim] of each layer, for the first tokens of a text at the first
    positions and the last below `limit`.

    Leaves the model set to the paged attention function.
    """
    model.set_attn_implementation(TRIAL)
    try:
        tokens = text.tokens[0][:5].to(model.device)[None]
        positions = torch.tensor([[0, 1, 2, 3, limit - 1]], device=model.device)
        kept: list[torch.Tensor] = []
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False, step=kept).logits[0]
        return [logits, *kept]
    finally:
        model.set_attn_implementation(ATTENTION)
