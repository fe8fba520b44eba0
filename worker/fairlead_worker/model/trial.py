"""Trial passes of a few tokens that each attend to themselves only: models of either kind run without KV."""

import torch
from transformers import PreTrainedModel

from fairlead_worker.kernels.states import Recurrent, zero_states
from fairlead_worker.model.attention import ATTENTION
from fairlead_worker.model.decoder import Decoder
from fairlead_worker.model.trial_text import TrialText

TRIAL_TOKENS = 5


class SelfAttention:
    """Implements `RecurrentContext`: each token attends to itself."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        """Queries and keys of each layer, [T, heads * dim]."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.seen += [query.flatten(1).clone(), key.flatten(1).clone()]
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)

    def scan(self, layer: Recurrent, *inputs: torch.Tensor) -> torch.Tensor:
        """Start every token from zeros."""
        outputs, _ = layer.advance([part[:, None] for part in inputs], zero_states(layer, len(inputs[0]), inputs[0]))
        return outputs[:, 0]


@torch.inference_mode()
def trial(model: PreTrainedModel, limit: int, text: TrialText) -> list[torch.Tensor]:
    """Return logits [5, vocabulary], then queries and keys [5, heads * dim] of each layer, for the first tokens of a text at the first
    positions and the last below `limit`.
    """
    context = SelfAttention()
    logits = _run(model, text.tokens[0][:TRIAL_TOKENS], [*range(TRIAL_TOKENS - 1), limit - 1], context)
    return [logits, *context.seen]


@torch.inference_mode()
def trial_logits(model: PreTrainedModel) -> torch.Tensor:
    """Return logits [5, vocabulary] of the first tokens of the vocabulary."""
    return _run(model, torch.arange(TRIAL_TOKENS), list(range(TRIAL_TOKENS)), SelfAttention())


def _run(model: PreTrainedModel, tokens: torch.Tensor, positions: list[int], context: SelfAttention) -> torch.Tensor:
    if not isinstance(model, Decoder):
        model.set_attn_implementation(ATTENTION)
    at = torch.tensor(positions, device=model.device)
    logits: torch.Tensor = model(input_ids=tokens.to(model.device)[None], position_ids=at[None], use_cache=False, step=context).logits[0]
    return logits
