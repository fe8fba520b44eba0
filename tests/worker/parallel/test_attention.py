"""Attention over four ranks, two of which share each head of keys and values: together they compute what the whole layer computes."""

from typing import Any, cast

import pytest
import torch
from tests.worker.parallel.test_recurrent import Recorded, tensor_part
from tests.worker.parallel.test_shards import build_own
from torch import nn

from fairlead_worker.model.layers.causal import CausalAttention
from fairlead_worker.sharding.group import Group
from fairlead_worker.sharding.shards import Shards


class Causal:
    """One row from its first token. Implements `StepContext.attend`."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(0, 1)


@pytest.mark.parametrize("family", ["phi3", "minimax_m2", "gpt_bigcode", "gpt_neox", "cohere with norms of heads", "granite_swa"])
def test_four_ranks_attend_as_one(family: str) -> None:
    torch.manual_seed(3)
    whole, _, path = _build(family)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.3)
    states, recorded, parts, context = torch.randn(9, 64), Recorded(), list[CausalAttention](), cast(Any, Causal())
    for rank in range(4):
        part, shards, _ = _build(family, rank)
        own = {name: tensor_part(tensor, shards, f"{path}.{name}") for name, tensor in whole.state_dict().items()}
        part.load_state_dict(own)
        part.ranks = cast(Group, recorded)
        if rank and part.parts[0].bias is not None:  # which `Summed` adds once
            nn.init.zeros_(part.parts[0].bias)
        assert part.spec.heads == part.spec.kv_heads == 1
        assert part.spec.sinks == (None if whole.spec.sinks is None else whole.spec.sinks[rank : rank + 1])
        parts.append(part)

    def run() -> torch.Tensor:
        return torch.stack([part(states, None, context) for part in parts]).sum(0)

    with torch.no_grad():
        run()
        recorded.is_complete = True
        torch.testing.assert_close(run(), whole(states, None, context))


def _build(family: str, rank: int = -1) -> tuple[CausalAttention, Shards, str]:
    """Return the attention of the second layer, the rank's part of it if there is a rank, and its path."""
    shards, model = Shards(rank, 4), build_own(family)
    if rank >= 0:
        shards.shrink(model)
    path, attention = next((path, each) for path, each in model.named_modules() if isinstance(each, CausalAttention) and ".1." in path)
    return attention.to_empty(device="cpu"), shards, path
