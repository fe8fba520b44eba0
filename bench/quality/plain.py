"""The same text through transformers alone: its own loader, modules and attention. In float32 it is the reference."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.quality.scores import BLOCK_LOGITS, Scores


def load_plain(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


@torch.inference_mode()
def score_plain(model: PreTrainedModel, prompts: Sequence[list[int]], see: Callable[[torch.Tensor], None] = lambda _: None) -> Scores:
    """Return the scores of `prompts`. `see` gets the logits [k, vocabulary] of consecutive positions."""
    logprobs: list[torch.Tensor] = []
    likeliest: list[torch.Tensor] = []
    for prompt in prompts:
        states = model.base_model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0, :-1]
        block = max(1, BLOCK_LOGITS // model.config.vocab_size)
        for some, targets in zip(torch.split(states, block), torch.split(torch.tensor(prompt[1:]), block), strict=True):
            logits = model.lm_head(some).float()
            see(logits)
            logprobs.append(logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])
            likeliest.append(logits.argmax(-1))
    return Scores(torch.cat(logprobs), torch.cat(likeliest))
