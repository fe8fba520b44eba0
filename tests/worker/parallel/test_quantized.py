"""Two ranks with parts of quantized weights give the answers of one process with the whole of them."""

import copy
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import FAMILIES, save_model
from tests.worker.exactness.harness import Engine, generate, make_prompts
from tests.worker.model.checkpoints import ACT_ORDER, DYNAMIC, FORMS, KEPT, STATIC, Form, blocks, fp8, fp8_of_tensors, int4, save_quantized
from tests.worker.model.formats.alone import Alone
from tests.worker.parallel.pair import Pair

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.formats import choose
from fairlead_worker.model.loader import load_model
from fairlead_worker.native.library import native
from fairlead_worker.sharding import weights
from fairlead_worker.sharding.scales import Groups, Shape, Spread, check_made, find_part
from fairlead_worker.sharding.shards import AnyCut, Cut, Pieces, Ranks, Shards, Unshardable

PROMPTS = make_prompts()[6:10]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": []}
SHARED = {"quant_method": "fp8", "weight_block_size": [64, 64]}
CUT_EXACTLY: dict[str, Form] = FORMS | {
    "float8 in blocks that two ranks share": Form(blocks(64, 64, "weight_scale_inv"), SHARED, {"intermediate_size": 192, "head_dim": 32}),
    "experts of float8 in blocks": Form(
        blocks(16, 32, "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [16, 32]}, EXPERTS, "qwen3_moe"
    ),
    "experts of int4 in groups": Form(int4, FORMS["int4 in groups"].about, EXPERTS, "qwen3_moe"),
}


@pytest.fixture(autouse=True)
def libraries(request: pytest.FixtureRequest) -> None:
    if "pair" in request.fixturenames and not all(find_spec(package) for package in ("compressed_tensors", "accelerate", "torchao")):
        pytest.skip("the extra gpu is not installed")


@pytest.fixture(autouse=True)
def experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "qwen3_moe", ("qwen3_moe", FAMILIES["qwen3"][1]))


def scores(engine: Engine) -> torch.Tensor:
    """Log-probabilities of each token of PROMPTS but the first ones, which do not depend on what is generated."""
    answers = engine.outputs(PROMPTS, root=9, prompt_logprobs=0)
    return torch.tensor([each.chosen for outputs in answers for each in outputs[0].prompt_logprobs])


def divided(pair: Pair, folder: Path, **options: Any) -> torch.Tensor:
    with pair.engine(folder, chunk=0, **options) as engine:
        return scores(engine)


def whole(folder: Path, **options: Any) -> torch.Tensor:
    return scores(Engine(load_model(str(folder), **options), chunk=0))


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root of the mean square of the differences, over that of the values."""
    return ((got - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


@pytest.mark.parametrize("form", CUT_EXACTLY.values(), ids=CUT_EXACTLY)
def test_parts_of_a_checkpoint_are_the_whole(form: Form, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_quantized(form, tmp_path)
    want = whole(tmp_path, dtype="float32")
    with pair.engine(tmp_path, chunk=64) as engine:
        assert engine.loaded.ranks == 2
        names = {name.rpartition(".")[2] for name, _ in engine.loaded.model.named_parameters()}
        assert names <= {"weight", "gate_up_proj", "down_proj"}, "nothing narrow takes room beside the wide weights"
        assert engine.serve(PROMPTS) == generate(model, PROMPTS)
        assert (scores(engine) - want).abs().max() < 1e-5 * want.abs().max()
    if form.make is fp8_of_tensors:
        return  # every rank has the scale
    monkeypatch.setattr(weights, "find_part", of_the_other_rank)
    assert far(divided(pair, tmp_path), want) > 1e-2, "the other rank's scales give other numbers"


@pytest.mark.parametrize("form", KEPT.values(), ids=KEPT)
def test_parts_of_float8_stay_in_8_bits(form: Form, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_quantized(form, tmp_path)
    want = whole(tmp_path, dtype="float32", quantization="fp8")
    with pair.engine(tmp_path, chunk=64, quantization="fp8") as engine:
        for path, cut in {"self_attn.q_proj": (0, 32), "mlp.down_proj.layer": (1, 64)}.items():
            held: Any = engine.loaded.model.get_submodule(f"model.layers.1.{path}")
            plain = model.get_parameter(f"model.layers.1.{path.removesuffix('.layer')}.weight")
            assert held.weight.nbytes == plain.numel() // 2
            assert torch.equal(held.numbers(), plain.narrow(cut[0], 0, cut[1])), "rank 0's half of the checkpoint's own numbers"
        assert engine.serve(PROMPTS) == generate(model, PROMPTS)
        assert (scores(engine) - want).abs().max() < 1e-5 * want.abs().max()
    if form.make is fp8:
        monkeypatch.setattr(weights, "find_part", of_the_other_rank)
        assert far(divided(pair, tmp_path, quantization="fp8"), want) > 1e-2


def of_the_other_rank(key: str, shape: list[int], kind: str, cut: Cut, groups: Groups) -> Any:
    place = find_part(key, shape, kind, cut, groups)
    if isinstance(place, Cut) and "packed" not in key:
        each = place.end - place.begin
        return Cut(place.dim, place.begin ^ each, (place.begin ^ each) + each)
    return place


def test_inputs_are_rounded_by_one_scale_as_in_the_whole(pair: Pair, tmp_path: Path) -> None:
    save_quantized(STATIC, tmp_path)
    assert far(divided(pair, tmp_path), whole(tmp_path)) < 1e-3


def test_inputs_of_a_part_are_rounded_no_coarser(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's largest input is sought on each rank, so a row-wise layer's inputs have a scale for each part."""
    model = save_quantized(DYNAMIC, tmp_path)
    model.save_pretrained(tmp_path / "plain")
    exact = whole(tmp_path / "plain")
    usual = far(whole(tmp_path), exact)
    assert 1e-3 < far(divided(pair, tmp_path), exact) < 1.5 * usual
    monkeypatch.setattr(weights, "find_part", of_the_other_rank)
    assert far(divided(pair, tmp_path), exact) > 5 * usual


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_each_rank_makes_its_own_part_at_load(quantization: str, pair: Pair, tmp_path: Path) -> None:
    if quantization != "fp8" and native() is None:
        pytest.skip("the native library does not load here")
    model = save_model("qwen3", tmp_path, tie_word_embeddings=True)
    exact = whole(tmp_path)
    usual = far(whole(tmp_path, quantization=quantization), exact)
    with pair.engine(tmp_path, chunk=0, quantization=quantization) as engine:
        layer = engine.loaded.model.get_submodule("model.layers.1.mlp.down_proj.layer")
        assert 1e-3 < far(scores(engine), exact) < 1.5 * usual
    mine, other = model.get_parameter("model.layers.1.mlp.down_proj.weight").data.chunk(2, 1)  # row-wise: rank 0 has the first inputs
    inputs = torch.eye(mine.shape[1])
    got = layer(inputs).T
    largest = mine.abs().amax(1, keepdim=True)
    # Half a step of a row's numbers: int8 has 127 to the row's largest, which the part finds for itself; float8's steps grow with a number.
    # Of a group of int4 the largest is 8 steps on one side, and 7 are all there are on the other.
    far_off = {
        "int8": 0.51 * largest / 127,
        "int4": 1.05 * mine.abs().unflatten(1, (-1, 32)).amax(2).repeat_interleave(32, 1) / 8,
        "fp8": 0.51 * (mine.abs() / 8).clamp(min=largest / 448 / 2**9),
    }[quantization]
    assert ((got - mine).abs() <= far_off).all()
    assert not ((got - other).abs() <= far_off).all()


def load_first(folder: Path, quantization: str = "none") -> None:
    """What rank 0 of two does until it would speak to the other."""
    load_model(str(folder), group=Alone(0), quantization=quantization)


@pytest.mark.parametrize(
    ("form", "cause"),
    [
        (
            replace(FORMS["int4 in groups"], changes={"intermediate_size": 96}),
            r"it cannot be divided \(--tensor-parallel-size 2\): model.layers.0.mlp.down_proj.weight_scale has one entry for 32 inputs, "
            r"and a rank's part \(inputs 0 to 48 of 96\) does not begin and end between two of them",
        ),
        (
            ACT_ORDER,
            r"it cannot be divided \(--tensor-parallel-size 2\): model.layers.0.mlp.down_proj.g_idx: groups of inputs in any order",
        ),
        (
            Form(fp8, {"quant_method": "torchao"}),
            r"quantized \(torchao\), which cannot be sharded: leave out --tensor-parallel-size 2, or take a checkpoint of ",
        ),
    ],
    ids=["within a group", "act-order", "torchao"],
)
def test_checkpoints_that_are_not_divided_say_why(form: Form, cause: str, tmp_path: Path) -> None:
    save_quantized(form, tmp_path)
    with pytest.raises(ModelLoadError, match=cause):
        load_first(tmp_path)


FOURS = Groups(frozenset({32}), frozenset({32}))
QKV = Ranks(0, 2).cut(32, 32, 32)


@pytest.mark.parametrize(
    ("key", "shape", "kind", "cut", "cause"),
    [
        ("weight_packed", [64, 12], "I32", Cut(1, 0, 36, 96), r"32-bit words of numbers of 4 bits, and .* \(inputs 0 to 36 of 96\)"),
        ("weight_zero_point", [3, 4], "I32", Cut(0, 12, 24, 24), r"32-bit words of numbers of 4 bits, and .* \(outputs 12 to 24 of 24\)"),
        ("weight_scale", [64, 3], "F32", Cut(1, 0, 48, 120), r"3 entries for 120 inputs, which are of no size .* \(32\)"),
        ("weight_g_idx", [96], "I32", Cut(1, 0, 48, 96), "act-order"),
        ("g_idx", [96], "I32", Cut(1, 0, 48, 96), "act-order"),
        ("qweight", [12, 64], "I32", Cut(1, 0, 36, 96), r"32-bit words of numbers of 4 bits, and .* \(inputs 0 to 36 of 96\)"),
        ("qzeros", [3, 3], "I32", Cut(0, 12, 24, 24), r"32-bit words of numbers of 4 bits, and .* \(outputs 12 to 24 of 24\)"),
        ("scales", [3, 64], "F16", Cut(1, 0, 48, 96), r"one entry for 32 inputs, and a rank's part \(inputs 0 to 48 of 96\)"),
        ("weight_twist", [96], "F32", Cut(1, 0, 48, 96), "its own division is unknown"),
        ("weight_scale_inv", [3, 1], "F32", QKV, "one entry for 32 outputs, and a rank's part .outputs 0 to 16 of 96."),
    ],
)
def test_what_has_no_part_is_refused_with_its_numbers(key: str, shape: list[int], kind: str, cut: AnyCut, cause: str) -> None:
    with pytest.raises(Unshardable, match=f"layers.0.mlp.down_proj.{key}.*{cause}"):
        find_part(f"layers.0.mlp.down_proj.{key}", shape, kind, cut, FOURS)


def test_each_section_of_a_weight_has_its_own_entries() -> None:
    """Of queries, keys and values side by side, all in one matrix."""
    layer = "layers.0.linear_attn.in_proj_qkv"
    assert find_part(f"{layer}.weight_scale", [96, 1], "F32", QKV, FOURS) == QKV
    assert find_part(f"{layer}.qweight", [8, 24], "I32", QKV, FOURS) == Pieces((Cut(1, 0, 4), Cut(1, 8, 12), Cut(1, 16, 20)))
    assert find_part(f"{layer}.weight_scale", [], "F32", QKV, FOURS) is None
    shape = find_part(f"{layer}.weight_shape", [2], "I64", QKV, FOURS)
    assert isinstance(shape, Shape) and shape.read(torch.tensor([96, 64])).tolist() == [48, 64]


def test_int4_at_load_is_refused_where_only_the_whole_has_whole_groups() -> None:
    made = choose.made_groups("int4")
    check_made("layers.0.mlp.down_proj", 1848, 3696, made)  # no groups on one device either: torchao leaves it as it is
    check_made("layers.0.mlp.down_proj", 14784, 29568, replace(made, made=64))
    with pytest.raises(Unshardable, match="in groups of 128 inputs, and a rank would have 3696 of its 29568"):
        check_made("layers.0.mlp.down_proj", 3696, 29568, made)


def test_a_grid_that_two_ranks_share_is_told_finer() -> None:
    """Three blocks of 64 over two ranks of 96: each has one of its own, and half of the one in the middle."""
    groups = Groups(frozenset({64}), frozenset({64}), widened=True)
    grid = torch.arange(12.0).view(3, 4)
    for rank, rows in enumerate(([0, 0, 1], [1, 2, 2])):
        place = find_part("mlp.gate_proj.weight_scale_inv", [3, 4], "F32", Cut(0, 96 * rank, 96 * rank + 96, 192), groups)
        assert isinstance(place, Spread)
        assert torch.equal(place.read(grid), grid[rows])


def test_a_rank_reads_its_own_bytes_and_no_others(tmp_path: Path) -> None:
    model = save_quantized(FORMS["int4 in groups with zero points"], tmp_path)
    for rank in range(2):
        shards = Shards(rank, 2)
        shards.shrink(copy.deepcopy(model))
        with weights.open_tensors(tmp_path, ["model.safetensors"]) as opened:
            tensors = {key: weights.Part(key, tensor, shards, FOURS) for key, tensor in opened.items()}
            for key, tensor in tensors.items():
                if key.endswith(("_proj.weight_packed", "_proj.weight_scale", "_proj.weight_zero_point")):
                    assert 2 * tensor[...].numel() == math.prod(tensor.get_shape()), key
                if key.endswith("down_proj.weight_shape"):
                    assert tensor[...].tolist() == [64, 64]
