"""Which part of a model each rank has, and which models cannot be divided."""

from typing import Any

import pytest
import torch
from tests.models import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fairlead_worker.config import WorkerConfig
from fairlead_worker.parallel.shards import Cut, Shards, Unshardable

MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}


def build(family: str, **changes: Any) -> PreTrainedModel:
    """Without weights."""
    kind, settings = FAMILIES.get(family, (family, FAMILIES["llama"][1]))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(settings | changes)))


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("qwen3", {}), ("gemma2", {}), ("qwen2", {"num_key_value_heads": 2}), ("mixtral", MIXTRAL)]
)
@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_all_ranks_are_the_whole(family: str, changes: dict[str, Any], size: int) -> None:
    whole = build(family, **changes)
    parts = []
    for rank in range(size):
        parts.append((build(family, **changes), shards := Shards(rank, size)))
        shards.shrink(parts[-1][0])
    divided = 0
    for name, parameter in whole.named_parameters():
        cuts = [shards.cut_of(f"some.prefix.{name}") for _, shards in parts]
        if ".experts." in name:
            assert {part.get_parameter(name).numel() for part, _ in parts} == {parameter.numel() // size}
            continue
        if cuts[0] is None:
            assert all(part.get_parameter(name).shape == parameter.shape for part, _ in parts)
            continue
        divided += 1
        dim = cuts[0].dim
        seen = {place for cut in cuts if cut is not None for place in range(cut.begin, cut.end)}
        assert seen == set(range(parameter.shape[dim])), "every output and input is somebody's"
        for cut, (part, _) in zip(cuts, parts, strict=True):
            assert cut is not None and torch.empty(parameter.shape)[cut.of(tuple(parameter.shape))].shape == part.get_parameter(name).shape
    assert divided > 4 * whole.config.num_hidden_layers


def test_ranks_that_share_a_kv_head_are_those_whose_heads_attend_to_it() -> None:
    keys = []
    for rank in range(4):
        shards = Shards(rank, 4)
        shards.shrink(build("llama"))  # four heads of 16, two of keys and values
        keys.append(shards.cut_of("model.layers.1.self_attn.k_proj.weight"))
    assert keys == [Cut(0, 0, 16), Cut(0, 0, 16), Cut(0, 16, 32), Cut(0, 16, 32)]


@pytest.mark.parametrize(
    ("family", "changes", "size", "cause"),
    [
        ("gpt2", {}, 2, "no tensor-parallel plan for GPT2LMHeadModel"),
        ("phi3", {}, 2, r"its plan wants model.layers.0.self_attn.o_proj rowwise_split_input|qkv_proj colwise_gather_output"),
        ("llama", {}, 3, r"the 4 heads of model.layers.0.self_attn.q_proj cannot be divided by 3"),
        ("llama", {"intermediate_size": 130}, 4, r"the 130 outputs of model.layers.0.mlp.gate_proj cannot be divided by 4"),
    ],
)
def test_what_cannot_be_divided_says_why(family: str, changes: dict[str, Any], size: int, cause: str) -> None:
    with pytest.raises(Unshardable, match=cause):
        Shards(0, size).shrink(build(family, **changes))


def test_adapters_are_refused_with_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--lora=sql=hf://a/b", "--allow-runtime-lora-updating"):
        with pytest.raises(SystemExit):
            WorkerConfig.from_command_line(["--model=hf://a/b", "--tensor-parallel=2", flag])
        assert "--tensor-parallel 2 serves no LoRA adapters: leave out --lora" in capsys.readouterr().err
