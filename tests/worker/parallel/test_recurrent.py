"""Recurrent layers over ranks: each has its part of the states, and together they give the tokens of `generate`, in float32."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.models import save_model
from tests.worker.exactness.cases import NGRAM
from tests.worker.exactness.harness import generate, make_prompts
from tests.worker.parallel.pair import Pair
from tests.worker.parallel.test_shards import build_own
from torch import nn

from fairlead_worker.kernels.states import Recurrent, zero_states
from fairlead_worker.model.layers.mamba2 import GroupNorm
from fairlead_worker.model.loader import load_model
from fairlead_worker.sharding.group import Group
from fairlead_worker.sharding.shards import Shards

PROMPTS = [prompt for prompt in make_prompts() if len(prompt) in (2, 33, 129)]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {},
    "qwen3_5 (text)": {},
    "olmo_hybrid": {},
    "kimi_linear": {},
    "mamba2": {"n_groups": 1},  # both ranks share the group and its norm
    "bamba": {},
    "granitemoehybrid": {},
    "granitemoehybrid without experts": {},
    "falcon_h1": {},
    "nemotron_h": {},
    "mamba": {},
    "jamba": {},
    "lfm2": {},
    "lfm2_moe": {},
}


@pytest.mark.parametrize("family", MODELS)
def test_each_rank_has_its_part_of_the_states(pair: Pair, tmp_path: Path, family: str) -> None:
    expected = generate(save_model(family, tmp_path, **MODELS[family]), PROMPTS)
    whole = load_model(str(tmp_path)).states
    with pair.engine(tmp_path, chunk=48, settings=NGRAM if family in ("qwen3_next", "mamba2") else {}) as engine:
        parts = engine.loaded.states
        assert [2 * prod(part.shapes[-1]) for part in parts] == [prod(state.shapes[-1]) for state in whole]
        assert engine.serve(PROMPTS) == expected
        assert engine.serve(PROMPTS) == expected, "from snapshots"
        drafts = engine.scheduler.load().drafts
        assert drafts is None or drafts.tokens


class Alone:
    """One row from its first token. Implements `RecurrentContext.scan`."""

    def scan(self, layer: Recurrent, *inputs: torch.Tensor) -> torch.Tensor:
        return layer.advance([part[None] for part in inputs], zero_states(layer, 1, inputs[0]))[0][0]


class Recorded:
    """Sums over ranks that run one after the other, twice: the first time it only adds up."""

    size = 4

    def __init__(self) -> None:
        self.total, self.is_complete = torch.zeros(()), False

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.is_complete:
            self.total = self.total + tensor
        return self.total


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_four_ranks_share_the_groups_of_a_norm(groups: int) -> None:
    def build(rank: int) -> tuple[nn.Module, Shards]:
        shards = Shards(rank, 4)
        model = build_own("mamba2", n_groups=groups)
        if rank >= 0:
            shards.shrink(model)
        return model.get_submodule("backbone.layers.1.mixer").to_empty(device="cpu"), shards

    torch.manual_seed(3)
    whole, _ = build(-1)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.3)
    states, recorded, parts = torch.randn(70, 64), Recorded(), list[nn.Module]()
    for rank in range(4):
        part, shards = build(rank)
        part.load_state_dict({name: tensor_part(tensor, shards, f"layers.1.mixer.{name}") for name, tensor in whole.state_dict().items()})
        norm = part.norm
        assert isinstance(norm, GroupNorm)
        norm.ranks = cast(Group, recorded)
        parts.append(part)

    def run() -> Sequence[torch.Tensor]:
        return [part(states, Alone()) for part in parts]

    with torch.no_grad():
        run()
        recorded.is_complete = True
        torch.testing.assert_close(sum(run()), whole(states, Alone()))


def tensor_part(tensor: torch.Tensor, shards: Shards, name: str) -> torch.Tensor:
    cut = shards.cut_of(name)
    if cut is None:
        return tensor
    return torch.cat([tensor[part.of(tuple(tensor.shape))] for part in cut.parts], cut.dim)
