"""The part of a model on each rank, and models that cannot be divided."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.models import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fairlead_worker.config import WorkerConfig
from fairlead_worker.lora.files import Pair, part_of
from fairlead_worker.model.catalog import SERVED
from fairlead_worker.model.families.registry import model_class
from fairlead_worker.sharding.shards import Cut, Shards, Unshardable

MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}


def build(family: str, **changes: Any) -> PreTrainedModel:
    """Without weights."""
    kind, settings = FAMILIES.get(family, (family, FAMILIES["llama"][1]))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(settings | changes)))


def build_own(name: str, **changes: Any) -> PreTrainedModel:
    """Return our decoder of a family that is served, without weights."""
    config = AutoConfig.for_model(SERVED[name].model_type, **(SERVED[name].config | changes))
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config)._from_config(config)
    return model


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
        assert seen == set(range(parameter.shape[dim])), "every output and input is on a rank"
        for cut, (part, _) in zip(cuts, parts, strict=True):
            assert cut is not None and torch.empty(parameter.shape)[cut.of(tuple(parameter.shape))].shape == part.get_parameter(name).shape
    assert divided > 4 * whole.config.num_hidden_layers


def test_lists_of_layers_are_told_apart() -> None:
    shards, cut = Shards(0, 2), Cut(0, 0, 8, 16)
    shards._parameter("model.sublayers.0.mlp.weight", torch.nn.Linear(8, 16), "weight", cut)
    assert shards.cut_of("sublayers.0.mlp.weight") == cut and shards.cut_of("model.layers.0.mlp.weight") is None
    model: Any = build("llama")
    model.further = torch.nn.ModuleDict({"layers": build("llama", intermediate_size=256).model.layers})
    with pytest.raises(Unshardable, match=r"two of its layers are called layers\.0\.mlp\.gate_proj, and a rank's parts of them differ"):
        Shards(0, 2).shrink(model)


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
        ("gpt2", {}, 2, "no tensor-parallel plan for GPT2LMHeadModel"),  # transformers' own class, not ours
        ("phi3", {}, 2, r"its plan has model.layers.0.self_attn.o_proj as rowwise_split_input|qkv_proj as colwise_gather_output"),
        ("llama", {}, 3, r"the 4 heads of model.layers.0.self_attn.q_proj cannot be divided by 3"),
        ("llama", {"intermediate_size": 130}, 4, r"the 130 outputs of model.layers.0.mlp.gate_proj cannot be divided by 4"),
    ],
)
def test_what_cannot_be_divided_says_why(family: str, changes: dict[str, Any], size: int, cause: str) -> None:
    with pytest.raises(Unshardable, match=cause):
        Shards(0, size).shrink(build(family, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "cause"),
    [
        ("llama4 (text)", {"intermediate_size": 33}, "the 33 inner values of model.layers.1.feed_forward.experts cannot be divided by 2"),
        ("qwen3_next", {"linear_num_key_heads": 1}, "model.layers.0.linear_attn: its 1 key heads cannot be divided by 2"),
        (
            "mamba2",
            {"n_groups": 3, "num_heads": 12, "hidden_size": 96},
            "its 3 groups of heads neither divide 2 ranks nor are divided by them",
        ),
        ("phi3", {"num_key_value_heads": 1, "num_attention_heads": 3, "hidden_size": 48}, "self_attn: its 3 heads cannot be divided by 2"),
        ("minimax_m2", {"num_key_value_heads": 3, "num_attention_heads": 6}, "its 3 heads of keys and values cannot be divided by 2"),
        ("llama", {"intermediate_size": 33}, "model.layers.0.mlp: its 33 inner values cannot be divided by 2"),
        ("gpt_oss", {"intermediate_size": 33}, "the 33 inner values of model.layers.0.mlp.experts cannot be divided by 2"),
        ("jamba", {"mamba_expand": 1, "hidden_size": 33}, "model.layers.0.mamba: its 33 channels cannot be divided by 2"),
    ],
)
def test_families_that_cannot_be_divided_say_why(family: str, changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(Unshardable, match=cause):
        Shards(0, 2).shrink(build_own(family, **changes))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (partial(build, "qwen2", num_key_value_heads=2), 14),
        (partial(build_own, "bamba"), 17),
        (partial(build_own, "phi3"), 8),
        (partial(build_own, "gpt_bigcode"), 8),
    ],
)
def test_what_all_ranks_add_for_an_adapter_is_what_it_adds(make: Callable[[], PreTrainedModel], count: int, size: int) -> None:
    """Of every layer of a model with biases and two KV heads, which four ranks share, of one with two groups of Mamba heads,
    and of two with queries, keys and values in one matrix.
    """
    whole = make()
    parts = []
    for rank in range(size):
        parts.append(Shards(rank, size))
        parts[-1].shrink(make())
    generator, layers = torch.Generator().manual_seed(3), 0
    for path, module in whole.named_modules():
        if not isinstance(module, torch.nn.Linear) or path == "lm_head":
            continue
        layers += 1
        down, up, hidden = (
            torch.randn(size, generator=generator, dtype=torch.float64)
            for size in ((4, module.in_features), (module.out_features, 4), (3, module.in_features))
        )
        pair = Pair(down, up)
        want = hidden @ pair.down.T @ pair.up.T
        answer = torch.zeros_like(want)
        for shards in parts:
            divided = shards.divided[path]
            assert divided.sizes == (module.in_features, module.out_features)
            down, up = part_of(pair, divided.cut)
            places = [place for part in divided.cut.parts for place in range(part.begin, part.end)]
            if path in shards.summed:
                answer += hidden[:, places] @ down.T @ up.T
            else:
                answer[:, places] = hidden @ down.T @ up.T
        torch.testing.assert_close(answer, want)
    assert layers == count


def test_flags_for_adapters_go_with_those_for_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model=hf://a/b", "--tensor-parallel-size=2", "--lora-modules=sql=hf://a/sql"]
    assert WorkerConfig.from_command_line(flags).loras == {"sql": "hf://a/sql"}
    with pytest.raises(SystemExit):
        WorkerConfig.from_command_line([*flags, "--deterministic"])
    assert "--deterministic is for one device and without LoRA adapters" in capsys.readouterr().err
