"""Two ranks with their parts of quantized weights say what one process says with the whole of them."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import FAMILIES, save_model
from tests.worker.exactness.harness import Engine, generate, make_prompts
from tests.worker.model.checkpoints import EIGHT, FORMS, Form, blocks, compressed, fp8_of_tensors, int4, int8, save_quantized
from tests.worker.parallel.pair import Pair

from fairlead_worker.model import quantized
from fairlead_worker.model.errors import ModelLoadError
from fairlead_worker.model.loader import load_model
from fairlead_worker.parallel import weights
from fairlead_worker.parallel.group import Group
from fairlead_worker.parallel.scales import Groups, Spread, beside
from fairlead_worker.parallel.shards import Cut, Unshardable

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
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
ROUNDED: dict[str, Form] = {
    "int8, and inputs of each token": Form(
        int8, compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, TOKEN | {"type": "int"})
    ),
    "float8, and inputs by one scale": Form(
        fp8_of_tensors, compressed("float-quantized", EIGHT | {"strategy": "tensor"}, EIGHT | {"strategy": "tensor", "dynamic": False})
    ),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if not all(find_spec(package) for package in ("compressed_tensors", "accelerate", "torchao")):
        pytest.skip("the extra gpu is not installed")
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()


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
        assert engine.serve(PROMPTS) == generate(model, PROMPTS)
        assert (scores(engine) - want).abs().max() < 1e-4 * want.abs().max()
    monkeypatch.setattr(weights, "beside", of_the_other_rank)
    assert far(divided(pair, tmp_path), want) > 1e-2, "whoever takes the other rank's scales is seen"


def of_the_other_rank(key: str, shape: list[int], kind: str, cut: Cut, groups: Groups) -> Any:
    place = beside(key, shape, kind, cut, groups)
    if isinstance(place, Cut) and "packed" not in key:
        each = place.end - place.begin
        return Cut(place.dim, place.begin ^ each, (place.begin ^ each) + each)
    return place
