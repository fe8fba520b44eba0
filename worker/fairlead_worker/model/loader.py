"""Model loader: a model URI becomes a decoder of our own, or a transformers model that attends through our backends."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.ipc.messages import Pooling
from fairlead_worker.kernels.base import LayerSpec
from fairlead_worker.kernels.states import StateSpec
from fairlead_worker.model.attention import UnsupportedAttention
from fairlead_worker.model.connect import connect
from fairlead_worker.model.decoder import Decoder
from fairlead_worker.model.dtype import choose_dtype
from fairlead_worker.model.formats.base import Format, Target
from fairlead_worker.model.formats.choose import (
    LIBRARIES,
    OF_QUANTIZED,
    check_products,
    made_groups,
    quantize_arguments,
    read_format,
)
from fairlead_worker.model.formats.experts import keep_experts
from fairlead_worker.model.formats.gguf import GgufBlocks, GgufWeights
from fairlead_worker.model.fuse import KINDS, fuse_layers
from fairlead_worker.model.fused.library import library
from fairlead_worker.model.kv_scales import read_kv_scales
from fairlead_worker.model.lowbit.choose import choose_rounder
from fairlead_worker.model.lowbit.experts import rounds_inputs
from fairlead_worker.model.lowbit.int4 import compile_int4, keep_int4
from fairlead_worker.model.lowbit.linear import keep_fp8
from fairlead_worker.model.packed import pack_linears
from fairlead_worker.model.plan import LoadPlan, plan_load
from fairlead_worker.model.pooling import read_pooling
from fairlead_worker.model.probe import probe_layers
from fairlead_worker.model.reading import find_file, read_model
from fairlead_worker.model.rope import fix_long_rope
from fairlead_worker.model.trial_text import NotFinite, Reference, TrialText
from fairlead_worker.sharding.group import Group
from fairlead_worker.sharding.shards import Shards, Unshardable
from fairlead_worker.sharding.weights import open_tensors
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.digest import model_digest
from fairlead_worker.weights.gguf.reader import GgufError, read_gguf
from fairlead_worker.weights.progress import Progress, no_progress
from fairlead_worker.weights.uri import resolve

logger = logging.getLogger(__name__)

PROJECTIONS = "projections"
FUSIONS = (PROJECTIONS, *KINDS)
"""Stacked projections (`layers.stack`), and the fusions of `model.fuse` with FlashInfer's kernels."""
INT4_COST = "4 bits cost 0.003 nats a token on SmolLM2-135M and 0.11 on Gemma 3 270M, int8 at most 0.01: compare your model's answers"
"""Of `python -m bench quality`."""
AGAIN = "download the checkpoint again, or quantize the model again"
Locate = Callable[[str, Progress, ModelCache | None], Path]
"""Returns the folder with the files of a URI; `resolve` downloads them."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and its properties."""

    model: PreTrainedModel
    layers: tuple[LayerSpec, ...]
    """Those with attention."""
    path: Path
    """Folder of the files, including the tokenizer."""
    digest: str
    """Digest of config, weights and dtype of the KV cache: part of the root of block hashes."""
    vocabulary_size: int
    """Rows of the input embedding: a larger token id fails the forward pass."""
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    """Tokens of prompt and output that the model was loaded for."""
    reference: Reference
    """What its weights say in float32: other ways to compute them are compared with it."""
    dtype: torch.dtype
    device: torch.device
    ranks: int = 1
    """Number of ranks that share it: `model` and `layers` are one rank's part."""
    shards: Shards | None = None
    """Which part; None: the whole model."""
    pooling: Pooling = field(default_factory=Pooling)
    """How it makes embeddings, by its files or `--pooling`."""
    generates: bool = True
    """False: the files have no head, as in models made for embeddings."""
    quantization: str = "none"
    """Quantization of linear layers by the native library: none, int8 or int4."""
    rounds_inputs: bool = False
    """Whether linear layers round their inputs to 8 bits."""
    fused: tuple[str, ...] = ()
    """Which of `FUSIONS` were applied, on a GPU."""
    kv_scales: tuple[float, ...] | None = None
    """Of each layer's KV in float8; None: KV has `dtype`."""
    states: tuple[StateSpec, ...] = ()
    """What each recurrent layer keeps of a request; empty: none is."""


def load_model(
    uri: str,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    max_model_len: int = 0,
    quantization: str = "none",
    pooling: str = "auto",
    matryoshka: bool = False,
    fuse: tuple[str, ...] = FUSIONS,
    kv_cache_dtype: str = "auto",
    progress: Progress = no_progress,
    cache: ModelCache | None = None,
    group: Group | None = None,
    locate: Locate = resolve,
) -> LoadedModel:
    """Load the causal LM at `uri` (a path, or a URI of `weights.uri`) onto `device`.

    dtype: auto, float32, bfloat16 or float16. max_model_len: 0 for the model's own limit, else a lower one.

    quantization: none; int8 or int4 for linear layers on a CPU, by the native library; fp8, or int4 on a GPU, by torchao. For a
    float8 checkpoint, fp8 keeps its linear layers in 8 bits on any device.

    pooling, matryoshka: see `read_pooling`.

    fuse: the `FUSIONS` to apply on a GPU where they can be. A CPU always stacks projections.

    kv_cache_dtype: auto or fp8, with the checkpoint's scales (`read_kv_scales`).

    group: the ranks that share the model and load it at the same time; None: it is not sharded. Raises ModelLoadError.
    """
    progress("config", 0)
    folder, place = locate(uri, progress, cache), torch.device(device)
    ranks = 1 if group is None else group.size
    plan = plan_load(uri, folder, dtype=dtype, device=place, max_model_len=max_model_len, quantization=quantization, ranks=ranks)
    config, limit = plan.config, plan.max_model_len
    if plan.native_quantization == "int4":
        logger.warning("--quantization int4: %s", INT4_COST)
    shards = None if group is None else Shards(group.rank, group.size)
    model, form, torch_dtype, generates = _read(uri, folder, plan, dtype, place, quantization, shards, group, progress)
    if model.device.type == "cuda":
        keep_fp8(model, torch_dtype, choose_rounder)
        keep_int4(model)
    if group is not None and shards is not None:
        connect(model, shards, group)
    try:
        layers = find_layers(model, limit)
    except UnsupportedAttention as error:
        raise ModelLoadError(uri, f"unsupported architecture: {error}") from error
    progress("fuse", 0)
    fused: tuple[str, ...] = ()
    text = TrialText.from_folder(folder, model.get_input_embeddings().weight.shape[0])
    try:
        reference = Reference.compute(model, layers, text)
    except NotFinite as error:
        raise ModelLoadError(uri, str(error)) from error
    except Exception as error:  # whatever a family's own code raises
        raise ModelLoadError(uri, f"unsupported architecture: {type(model).__name__} does not run: {error}") from error
    in_blocks = isinstance(form, GgufBlocks) and form.keeps
    if in_blocks:
        logger.info("linear layers stay in the blocks of %s", plan.gguf)
    elif model.device.type == "cpu":
        if isinstance(model, Decoder):
            model.stack()
        pack_linears(model, plan.native_quantization)
        if plan.native_quantization != "none":
            reference = Reference.compute(model, layers, text)
    else:
        fused = fuse_model(model, limit, fuse, text)
        compile_int4(model)
    progress("fuse", 100)
    digest, kv_scales = model_digest(folder), None
    if kv_cache_dtype == "fp8":  # blocks of another dtype are never shared
        digest, kv_scales = f"{digest}-kv-fp8", read_kv_scales(uri, folder, plan.files, layers_with_kv(model, layers))
    return LoadedModel(
        model=model,
        layers=layers,
        path=folder,
        digest=digest,
        vocabulary_size=model.get_input_embeddings().weight.shape[0],
        eos_token_ids=_eos_token_ids(folder, config),
        max_model_len=limit,
        dtype=torch_dtype,
        device=model.device,
        ranks=ranks,
        shards=shards,
        pooling=read_pooling(folder, config, pooling, matryoshka),
        generates=generates,
        quantization=plan.native_quantization,
        reference=reference,
        rounds_inputs=in_blocks or plan.native_quantization != "none" or rounds_inputs(model),
        fused=fused,
        kv_scales=kv_scales,
        states=model.states if isinstance(model, Decoder) else (),
    )


def find_layers(model: PreTrainedModel, limit: int) -> tuple[LayerSpec, ...]:
    """Return what each layer needs of attention: by our definition, else by running the model. Raises UnsupportedAttention."""
    if isinstance(model, Decoder):
        model.prepare(limit)
        return model.specs
    logger.info("%s runs by transformers' own code: it is none of our decoders", type(model).__name__)
    fix_long_rope(model, limit)
    return probe_layers(model)


def layers_with_kv(model: PreTrainedModel, layers: Sequence[LayerSpec]) -> Sequence[int]:
    """Return the number in the checkpoint of each of `layers`, the layers with attention."""
    return model.attending if isinstance(model, Decoder) else range(len(layers))


def fuse_model(model: PreTrainedModel, limit: int, wanted: tuple[str, ...], text: TrialText) -> tuple[str, ...]:
    """Apply the `wanted` fusions of a GPU; return those that succeeded."""
    stacked = (PROJECTIONS,) if PROJECTIONS in wanted and isinstance(model, Decoder) and model.stack() else ()
    kernels = library() if set(wanted) & set(KINDS) else None
    return stacked if kernels is None else (*stacked, *fuse_layers(model, kernels, limit, text, wanted))


def _read(
    uri: str,
    folder: Path,
    plan: LoadPlan,
    dtype: str,
    device: torch.device,
    quantization: str,
    shards: Shards | None,
    group: Group | None,
    progress: Progress,
) -> tuple[PreTrainedModel, Format | None, torch.dtype, bool]:
    """Return the model, the format of its weights, the dtype that it computes in, and whether it has its own head.

    Tensor after tensor goes from the mapped files onto the device. On the host they occupy the kernel's file cache only, without a
    copy.
    """
    config, torch_dtype, experts = plan.config, plan.dtype, None
    try:
        blocks = None if plan.gguf is None else GgufBlocks(GgufWeights(read_gguf(plan.gguf, texts=False), config), config)
        with open_tensors(folder, plan.files, plan.rename) as opened:
            tensors = opened if blocks is None else blocks.weights
            form: Format | None = blocks or read_format(uri, config, tensors, quantization)
            further = {} if form is not None else quantize_arguments(uri, quantization, device)
            if form is not None:
                if (lack := form.find_missing(tensors)) is not None:
                    raise ModelLoadError(uri, f"{find_file(folder, plan.files, lack[0])} has {lack[0]}, and no file has {lack[1]}: {AGAIN}")
                target = Target(torch_dtype, capability_of(device), dtype, quantization, 1 if group is None else group.size)
                form.settle(target, device)
                experts = keep_experts(config, form, tensors, target, device)
                if group is not None:  # layers of the ranks would compute in different dtypes
                    form.keeps = bool(group.least(int(form.keeps)))
                    if not group.least(int(experts is not None)) and experts is not None:
                        logger.warning(
                            "experts are widened to %s: another rank's device does not multiply them right", str(torch_dtype)[6:]
                        )
                        experts = None
                if form.keeps and form.computes is not None:
                    torch_dtype = choose_dtype(uri, str(form.computes).removeprefix("torch."), config, device)
                config.__dict__.pop("quantization_config", None)  # transformers would ask for its own modules
            if plan.is_wrapped and "lm_head.weight" in tensors:  # the wrapper's config and its text part's may disagree
                config.tie_word_embeddings = False
            bare = [] if blocks is not None or form is None else find_bare(form, tensors)
            size = sum((folder / name).stat().st_size for name in plan.files) if blocks is None else blocks.size
            progress("config", 100)
            progress("weights", 0, 0, size)
            model, info = read_model(
                folder,
                config,
                tensors,
                form,
                experts,
                torch_dtype,
                device,
                shards=shards,
                groups=made_groups("none" if plan.native_quantization != "none" else quantization) if form is None else form.groups,
                further=further,
                progress=lambda percent: progress("weights", percent, size * percent // 100, size),
            )
    except Unshardable as error:
        raise ModelLoadError(uri, f"it cannot be divided (--tensor-parallel-size {shards.size if shards else 1}): {error}") from error
    except ModelLoadError:
        raise
    except GgufError as error:
        raise ModelLoadError(uri, str(error)) from error
    except Exception as error:
        of_torchao = hasattr(config, "quantization_config")
        hint = f" The log names each weight that torchao could not make (CONVERSION): {AGAIN}" if of_torchao else ""
        raise ModelLoadError(uri, f"weights cannot be loaded: {type(error).__name__}: {error}{hint}") from error
    check_products(uri, model, torch_dtype)
    own = {name.removesuffix(".weight") for name, _ in model.named_parameters()}
    if alone := sorted(key for key in info["unexpected_keys"] if key.endswith(OF_QUANTIZED) and key.rpartition(".")[0] in own):
        raise ModelLoadError(
            uri,
            f"it has {alone[0]}, as quantized weights do, and its config.json does not say how they are to be read: give it the "
            f"quantization_config that it was made with, or take one of {', '.join(sorted(LIBRARIES))}",
        )
    if without := next((name for name in bare if name.removesuffix(".weight") in own), ""):
        file = find_file(folder, plan.files, without)
        raise ModelLoadError(uri, f"missing weights: {without} of {file} is in float8, and no file has its scale: {AGAIN}")
    missing = sorted(info["missing_keys"])
    headless = missing == ["lm_head.weight"] and not plan.names_head
    if missing and not headless:
        raise ModelLoadError(uri, f"missing weights: {len(missing)} tensors, first {missing[0]}")
    progress("weights", 100, size, size)
    return model, form, torch_dtype, not headless


def find_bare(form: Format, tensors: Mapping[str, Any]) -> list[str]:
    """Return the weights in float8 that have no scale. They would be read as plain numbers. tensors: slices of the files."""
    names = (name for name in tensors if name.endswith(".weight") and name not in form.weights)
    return [name for name in names if tensors[name].get_dtype() == "F8_E4M3"]


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _eos_token_ids(folder: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    ids = None
    if (folder / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    if ids is None:
        ids = getattr(config.get_text_config(decoder=True), "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
