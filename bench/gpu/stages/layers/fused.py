"""Stage: what each fusion is worth. Layers of an 8B-shaped model, decodes and a chunk, each kind off, then on, taking turns in one run."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from bench.gpu import interpreter
from bench.gpu.device import Device, median
from bench.gpu.roofline import Rates, beside_roofline, rates_of
from fairlead_worker.kernels.flashinfer_library import library
from fairlead_worker.model.fuse import fuse_projections
from fairlead_worker.model.fused.fuse import KINDS, fuse_layers
from fairlead_worker.model.fused.trial import TRIAL
from fairlead_worker.model.loader import PROJECTIONS
from fairlead_worker.model.probe import probe_layers
from fairlead_worker.model.trial_text import Reference, TrialText

LIMIT = 4096
TEXT = TrialText.random(64)
ROUNDS = 5
DENSE = tuple(kind for kind in KINDS if kind not in ("experts", "sums"))
"""Kinds of a model without experts on one GPU."""


def measure(device: Device) -> Iterator[dict[str, Any]]:
    """For each number of tokens: milliseconds of the layers with nothing fused, with one kind more each time, and with all."""
    kernels: Any = library() if device.cuda else interpreter
    if kernels is None:
        yield {"what": "FlashInfer is installed", "ok": False}
        return
    variants: dict[str, PreTrainedModel] = {}
    for count in range(len(DENSE) + 2):
        wanted = (PROJECTIONS, *DENSE)[:count]
        model = build(device)
        layers = probe_layers(model)
        if PROJECTIONS in wanted:
            fuse_projections(model, layers, Reference.compute(model, layers, TEXT))
        made = fuse_layers(model, kernels, layers, LIMIT, TEXT, wanted) if len(wanted) > 1 else ()
        yield {"what": f"fused: {', '.join(wanted) or 'nothing'}", "ok": set(made) == set(wanted) - {PROJECTIONS}}
        variants[wanted[-1] if wanted else "nothing"] = model
    rates = rates_of(device)
    for tokens in (1, 16, 256, 2048) if not device.tiny else (1, 8):
        work = pass_work(variants["nothing"], tokens)
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(ROUNDS if not device.tiny else 1):
            for name, model in variants.items():
                times[name].append(device.kernel_seconds([run(model, tokens)], 5))
        before = median(times["nothing"])
        for name, found in times.items():
            now = median(found)
            what = f"{tokens} tokens, {'nothing fused' if name == 'nothing' else 'and ' + name}"
            row = {"what": what, "ms": now * 1e3, "of_nothing": now / median(times["nothing"]), "of_the_one_before": now / before}
            yield beside_roofline(row, rates, work, now)
            before = now

    yield from _experts(device, kernels, rates)


def _experts(device: Device, kernels: Any, rates: Rates) -> Iterator[dict[str, Any]]:
    """Rows: milliseconds of layers with the experts of Qwen3 30B-A3B's shape, four of them, in their family's code and in ours."""
    width, inner, count, heads = (2048, 768, 128, 32) if device.cuda else (128, 64, 4, 4)
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=width, moe_intermediate_size=inner, num_experts=count, num_experts_per_tok=min(8, count // 2),
        num_attention_heads=heads, num_key_value_heads=4, head_dim=64, num_hidden_layers=4, vocab_size=512, norm_topk_prob=True,
        max_position_embeddings=LIMIT, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(7)
    with device.device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.eval()
    sizes = (1, 16, 256, 2048) if not device.tiny else (1, 8)
    before = {tokens: device.seconds(run(model, tokens), 5) for tokens in sizes}
    works = {tokens: pass_work(model, tokens) for tokens in sizes}
    made = fuse_layers(model, kernels, probe_layers(model), LIMIT, TEXT, ("experts",))
    yield {"what": "fused: experts", "ok": made == ("experts",)}
    for tokens in sizes:
        now, alone = device.seconds(run(model, tokens), 5), device.kernel_seconds([run(model, tokens)], 5)
        row = {"what": f"{tokens} tokens, experts", "ms": now * 1e3, "of_nothing": now / before[tokens], "ms_in_a_graph": alone * 1e3}
        yield beside_roofline(row, rates, works[tokens], alone)


def pass_work(model: PreTrainedModel, tokens: int) -> tuple[float, float]:
    """Return bytes (weights, in bfloat16) and FLOPs of a pass of `model`, nothing fused. Experts count as if tokens chose them evenly."""
    experts = sum(weight.nbytes for name, weight in model.named_parameters() if ".experts." in name)
    dense = sum(weight.nbytes for weight in model.parameters()) - experts - model.get_input_embeddings().weight.nbytes
    chosen = getattr(model.config, "num_experts_per_tok", 1) / getattr(model.config, "num_experts", 1)
    return dense + experts * (1 - (1 - chosen) ** tokens), tokens * (dense + experts * chosen)


def build(device: Device) -> PreTrainedModel:
    """Llama's layers of 8B's shape, four of them, random, in bfloat16; attention is left out (each token attends to itself)."""
    shape = (4096, 14336, 32, 8, 4) if device.cuda else (128, 256, 4, 2, 2)
    config = AutoConfig.for_model(
        "llama", hidden_size=shape[0], intermediate_size=shape[1], num_attention_heads=shape[2], num_key_value_heads=shape[3],
        num_hidden_layers=shape[4], head_dim=128, vocab_size=512, max_position_embeddings=LIMIT, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(7)
    with device.device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def run(model: PreTrainedModel, tokens: int) -> Callable[[], Any]:
    """A pass of so many tokens."""
    model.set_attn_implementation(TRIAL)
    places = torch.arange(tokens, device=model.device)[None]

    def step() -> None:
        with torch.inference_mode():
            model(input_ids=places % 512, position_ids=places, use_cache=False, step=[])

    return step
