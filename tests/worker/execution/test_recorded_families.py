"""Families in a graph: recorded with some tokens and replayed with others, the output equals a plain run."""

from pathlib import Path

import pytest
import torch
from tests.models import save_model
from tests.worker.execution.replayed import Replayed

from fairlead_worker.model.loader import load_model
from fairlead_worker.model.trial import SelfAttention

GRAPHED = ["qwen3", "gemma3", "gpt2", "phi3", "cohere2", "mixtral", "qwen3_moe", "deepseek_v3", "yarn rope", "dynamic rope"]


@pytest.mark.parametrize("family", GRAPHED)
@torch.inference_mode()
def test_a_recorded_model_says_what_it_says(family: str, tmp_path: Path) -> None:
    """Attention (each token to itself) apart. No rope reads how long the text is, which would wait for the device."""
    save_model(family, tmp_path)
    model = load_model(str(tmp_path), dtype="float16").model
    tokens, positions, every = torch.arange(3, 9), torch.zeros(6, dtype=torch.int64), torch.arange(6)

    def run() -> torch.Tensor:
        logits: torch.Tensor = model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=every, step=SelfAttention()
        ).logits[0]
        return logits

    before = run()
    replay = Replayed().record(run)
    tokens.copy_(torch.tensor([40, 9, 300, 77, 5, 12]))
    positions.copy_(torch.tensor([0, 7, 90, 33, 2, 64]))
    assert torch.equal(replay(), run()) and not torch.equal(before, run())
