"""Model loader: a model URI becomes a decoder of our own, or a transformers model that attends through our backends."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.ipc.messages import Pooling
from fairlead_worker.kernels.base import LayerSpec
from fairlead_worker.kernels.states import StateSpec
from fairlead_worker.model.adapters import describe_unsupported, register_adapter
from fairlead_worker.model.attention import UnsupportedAttention
from fairlead_worker.model.connect import connect
from fairlead_worker.model.decoder import Decoder
from fairlead_worker.model.dtype import choose_dtype
from fairlead_worker.model.expert_checkpoint import KeptExperts, keep_experts
from fairlead_worker.model.families.registry import model_class
from fairlead_worker.model.fuse import KINDS, fuse_activations, fuse_layers
from fairlead_worker.model.fused.library import library
from fairlead_worker.model.gguf import find_gguf, read_gguf_model
from fairlead_worker.model.kv_scales import read_kv_scales
from fairlead_worker.model.lowbit.checkpoint import has_tensor_scales, keeps_fp8, reshape_scales, take_fp8
from fairlead_worker.model.lowbit.choose import choose_rounder
from fairlead_worker.model.lowbit.experts import rounds_inputs
from fairlead_worker.model.lowbit.int4 import compile_int4, keep_int4
from fairlead_worker.model.lowbit.linear import keep_fp8
from fairlead_worker.model.lowbit.stored import COMPRESSED, Stored, find_stored, stored_class, take_stored
from fairlead_worker.model.packed import DTYPES, pack_linears
from fairlead_worker.model.pooling import read_pooling
from fairlead_worker.model.probe import probe_layers
from fairlead_worker.model.quantized import (
    LIBRARIES,
    OF_QUANTIZED,
    check_checkpoint,
    check_stored,
    dequantize,
    groups_of,
    ignore_kv_scheme,
    packing_of,
    quantize_arguments,
    read_alone,
    read_arguments,
    round_by_token,
)
from fairlead_worker.model.rope import fix_long_rope
from fairlead_worker.model.rope import max_model_len as context_length
from fairlead_worker.model.trial_text import NotFinite, Reference, TrialText
from fairlead_worker.model.wrappers import plain_config, text_names
from fairlead_worker.native.library import native
from fairlead_worker.platform.isa import VARIABLE, cpu_level
from fairlead_worker.plugins import PluginError
from fairlead_worker.sharding.group import Group
from fairlead_worker.sharding.scales import Groups
from fairlead_worker.sharding.shards import Shards, Unshardable
from fairlead_worker.sharding.weights import Part, open_tensors, part_class
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.digest import model_digest
from fairlead_worker.weights.progress import Progress, no_progress
from fairlead_worker.weights.uri import resolve

logger = logging.getLogger(__name__)

PROJECTIONS = "projections"
FUSIONS = (PROJECTIONS, *KINDS)
"""Stacked projections (`layers.stack`), and the fusions of `model.fuse` with FlashInfer's kernels."""
INT4_COST = "4 bits cost 0.003 nats a token on SmolLM2-135M and 0.11 on Gemma 3 270M, int8 at most 0.01: compare your model's answers"
"""Of `python -m bench quality`."""
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


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What files and settings decide before any weight is read. `fairlead check` plans without a load."""

    config: PreTrainedConfig
    """Of the decoder."""
    is_wrapped: bool
    """Whether it is the text part of a model that reads more than text."""
    max_model_len: int
    dtype: torch.dtype
    native_quantization: str
    """none, int8 or int4, by the native library."""
    gguf: Path | None
    """The GGUF file with the weights; None: `files` have them."""
    files: list[str]


def plan_load(uri: str, folder: Path, *, dtype: str, device: torch.device, max_model_len: int, quantization: str, ranks: int) -> LoadPlan:
    """Return how the model in `folder` is loaded; the arguments are those of `load_model`. `device` may be one that is not here.

    Raises ModelLoadError.
    """
    config, is_wrapped = _read_config(uri, folder, ranks)
    ignore_kv_scheme(config)
    limit = context_length(uri, config, max_model_len)
    torch_dtype = choose_dtype(uri, dtype, config, device)
    native_quantization = quantization if quantization == "int8" or (quantization == "int4" and device.type == "cpu") else "none"
    if native_quantization != "none":
        _check_native(uri, quantization, torch_dtype, device)
    if (gguf := find_gguf(folder)) is not None:
        _check_gguf(uri, quantization, ranks)
    files = [] if gguf is not None else check_weights(uri, folder)
    return LoadPlan(config, is_wrapped, limit, torch_dtype, native_quantization, gguf, files)


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
    folder = locate(uri, progress, cache)
    ranks = 1 if group is None else group.size
    plan = plan_load(
        uri, folder, dtype=dtype, device=torch.device(device), max_model_len=max_model_len, quantization=quantization, ranks=ranks
    )
    config, limit, torch_dtype, files, blocks = plan.config, plan.max_model_len, plan.dtype, plan.files, plan.gguf
    native_quantization, is_wrapped, in_blocks = plan.native_quantization, plan.is_wrapped, False
    stored = hasattr(config, "quantization_config")
    if native_quantization == "int4":
        logger.warning("--quantization int4: %s", INT4_COST)
    named: dict[str, Any] = {}
    keeps, experts, packed = False, None, None
    if stored:
        experts = keep_experts(config, folder, files, torch_dtype, torch.device(device), ranks)
        keeps = keeps_fp8(config, torch_dtype, torch.device(device), ranks, experts is not None)
        named = read_arguments(uri, config, keeps)
        check_stored(uri, quantization, config)
        packing = packing_of(uri, config)
        if experts is not None:
            experts.leave_out(config)
        packed = None if packing is None else find_stored(uri, folder, files, packing, dtype, torch.device(device))
        if group is not None and packing is not None and not group.least(int(packed is not None and packed.keep)):
            # One rank cannot keep 4 bits, so that none does: they would compute in different dtypes.
            packed = None if packed is None or packing.method == COMPRESSED else replace(packed, keep=False)
        if packed is not None and packed.keep:
            torch_dtype = choose_dtype(uri, "bfloat16", config, torch.device(device))
    given = named if stored else quantize_arguments(uri, quantization, torch.device(device))
    groups = Groups() if group is None else groups_of(config, "none" if native_quantization != "none" else quantization)
    progress("config", 100)
    if packed is not None:
        del config.quantization_config  # transformers would ask for its own modules
        given = {}
    shards = None if group is None else Shards(group.rank, group.size)
    if blocks is not None:
        generates = True
        model, in_blocks = read_gguf_model(uri, blocks, config, torch_dtype, torch.device(device), progress)
    else:
        model, generates = _read_weights(
            uri, folder, files, config, torch_dtype, torch.device(device), progress, shards, given, groups, packed, experts, is_wrapped
        )
    if packed is not None:
        take_stored(uri, model, torch_dtype, packed.keep)
    dequantize(model, torch_dtype, retain=quantization == "fp8")
    round_by_token(model)
    if model.device.type == "cuda":
        keep_fp8(model, torch_dtype, choose_rounder)
        keep_int4(model)
    if keeps:
        logger.info("%d linear layers stay in float8", take_fp8(model, torch_dtype))
    if experts is not None:
        logger.info("the experts of %d layers stay in few bits", experts.take(model))
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
    fuse_activations(model)
    if in_blocks:
        logger.info("linear layers stay in the blocks of %s", blocks)
    elif model.device.type == "cpu":
        if isinstance(model, Decoder):
            model.stack()
        pack_linears(model, native_quantization)
        if native_quantization != "none":
            reference = Reference.compute(model, layers, text)
    else:
        fused = fuse_model(model, limit, fuse, text)
        compile_int4(model)
    progress("fuse", 100)
    digest, kv_scales = model_digest(folder), None
    if kv_cache_dtype == "fp8":  # blocks of another dtype are never shared
        digest, kv_scales = f"{digest}-kv-fp8", read_kv_scales(uri, folder, files, layers_with_kv(model, layers))
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
        quantization=native_quantization,
        reference=reference,
        rounds_inputs=in_blocks or native_quantization != "none" or rounds_inputs(model),
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


def _read_config(uri: str, folder: Path, ranks: int) -> tuple[PreTrainedConfig, bool]:
    """Return the config of the decoder, and whether it is the text part of a model that reads more than text."""
    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(uri, f"config.json cannot be read: {error}") from error
    if "quantization_config" in raw:
        check_checkpoint(uri, raw["quantization_config"].get("quant_method", "unknown"), ranks)
    try:
        plain = plain_config(raw)
    except ValueError as error:
        raise ModelLoadError(uri, f"config.json: {error}") from error
    kind = raw.get("model_type") if plain is None else plain[0]["model_type"]
    try:
        known = isinstance(kind, str) and register_adapter(kind)
    except PluginError as error:
        raise ModelLoadError(uri, str(error)) from error
    if not known:
        raise ModelLoadError(uri, f"unsupported architecture: {describe_unsupported(raw)}")
    try:
        if plain is not None:
            logger.info("model_type %s: %s is served, as %s", raw["model_type"], "its text part" if plain[1] else "it", kind)
            return AutoConfig.for_model(**plain[0]), plain[1]
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False), False
    except Exception as error:
        raise ModelLoadError(uri, f"config.json is not a valid {kind} config: {error}") from error


def _check_native(uri: str, quantization: str, dtype: torch.dtype, device: torch.device) -> None:
    """Check that the native library can hold weights of `quantization` here. Raises ModelLoadError."""
    wanted = f"--quantization {quantization}"
    if device.type != "cpu":
        raise ModelLoadError(uri, f"{wanted} is for CPUs, and this is {device.type}; leave it out")
    if native() is None:
        reason = f"this process runs at CPU level none ({VARIABLE})" if cpu_level() == "none" else "the log says why"
        raise ModelLoadError(uri, f"{wanted} on a CPU needs the native library, which does not load here: {reason}; leave it out")
    if dtype not in DTYPES:
        raise ModelLoadError(uri, f"{wanted} needs --dtype bfloat16 or float32, not {str(dtype).removeprefix('torch.')}")


def _check_gguf(uri: str, quantization: str, ranks: int) -> None:
    """Check the settings that need a checkpoint in safetensors. Raises ModelLoadError."""
    if quantization != "none":
        raise ModelLoadError(uri, f"its weights are quantized in the GGUF file, so --quantization {quantization} is refused; leave it out")
    if ranks > 1:
        raise ModelLoadError(uri, f"--tensor-parallel-size {ranks} is not supported for a GGUF file; serve the model's safetensors")


def check_weights(uri: str, folder: Path) -> list[str]:
    """Return the files that hold the weights. Raises ModelLoadError."""
    present = {path.name for path in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            needed = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(uri, f"{index.name} cannot be read: {error!r}") from error
        if missing := sorted(needed - present):
            raise ModelLoadError(uri, f"missing weights: {', '.join(missing[:4])}{' …' if len(missing) > 4 else ''} not in {folder}")
    elif "model.safetensors" in present:
        needed = {"model.safetensors"}
    else:
        pickled = next(iter(sorted(folder.glob("*.bin"))), None)
        hint = f"{pickled.name} is pickled, and pickles run code: convert it to safetensors" if pickled else "no *.safetensors there"
        raise ModelLoadError(uri, f"missing weights: no model.safetensors in {folder}; {hint}")
    if locked := [path.name for path in sorted(folder.glob("*.safetensors")) if not os.access(path, os.R_OK)]:
        raise ModelLoadError(
            uri, f"{locked[0]} in {folder} may not be read by user {os.getuid()}: make it readable, or run the pod as its owner"
        )
    return sorted(needed)


def _read_weights(
    uri: str,
    folder: Path,
    files: list[str],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    shards: Shards | None,
    further: dict[str, Any],
    groups: Groups,
    packed: Stored | None,
    experts: KeptExperts | None,
    is_wrapped: bool,
) -> tuple[PreTrainedModel, bool]:
    """Read the weights; return the model and whether it has its own head.

    Tensor after tensor goes from the mapped files onto the device. On the host they occupy the kernel's file cache only, without a
    copy.
    """
    size = sum((folder / name).stat().st_size for name in files)
    progress("weights", 0, 0, size)
    given: dict[str, Any] = {"config": config, "dtype": dtype, "output_loading_info": True}
    if device.type != "cpu" and find_spec("accelerate"):  # without accelerate, transformers reads to the host first
        given["device_map"] = {"": device}
    given |= further
    try:
        with _weight_progress(progress, size), read_alone(config, model_class(config)), ExitStack() as opened:
            reshapes = has_tensor_scales(config) and (experts is not None or not config.quantization_config["dequantize"])
            read: Callable[..., Any] = partial(AutoModelForCausalLM.from_pretrained, trust_remote_code=False)
            source: dict[str, Any] = {"pretrained_model_name_or_path": folder, "use_safetensors": True, "local_files_only": True}
            family = model_class(config)
            if issubclass(family, Decoder):
                read = family.from_pretrained
            tensors: dict[str, Any] | None = None
            if shards is not None or experts is not None or reshapes or is_wrapped:
                tensors = opened.enter_context(open_tensors(folder, files, text_names if is_wrapped else None))
                if is_wrapped and "lm_head.weight" in tensors:  # the wrapper's config and its text part's may disagree
                    config.tie_word_embeddings = False
                if shards is not None:
                    cut = {key: Part(key, tensor, shards, groups) for key, tensor in tensors.items()}
                    family, tensors = part_class(family, shards, cut, groups), dict(cut)
            if tensors is not None:
                source = {"pretrained_model_name_or_path": None, "state_dict": reshape_scales(tensors) if reshapes else tensors}
                read = family.from_pretrained
            if experts is not None:
                read = experts.model_class(family).from_pretrained
            if packed is not None:
                if family.config_class is type(text := config.get_text_config(decoder=True)):
                    given["config"] = text  # as AutoModelForCausalLM does
                read = stored_class(family, packed).from_pretrained
            model, info = read(**source, **given)
    except Unshardable as error:
        raise ModelLoadError(uri, f"it cannot be divided (--tensor-parallel-size {shards.size if shards else 1}): {error}") from error
    except Exception as error:
        raise ModelLoadError(uri, f"weights cannot be loaded: {type(error).__name__}: {error}") from error
    own = {name.removesuffix(".weight") for name, _ in model.named_parameters()}
    if alone := sorted(key for key in info["unexpected_keys"] if key.endswith(OF_QUANTIZED) and key.rpartition(".")[0] in own):
        raise ModelLoadError(
            uri,
            f"it has {alone[0]}, as quantized weights do, and its config.json does not say how they are to be read: give it the "
            f"quantization_config that it was made with, or take one of {', '.join(sorted(LIBRARIES))}",
        )
    missing = sorted(info["missing_keys"])
    headless = missing == ["lm_head.weight"] and not is_wrapped and not any("ForCausalLM" in name for name in config.architectures or ())
    if missing and not headless:
        raise ModelLoadError(uri, f"missing weights: {len(missing)} tensors, first {missing[0]}")
    model = (model if "device_map" in given else model.to(device)).eval().requires_grad_(False)
    progress("weights", 100, size, size)
    return model, not headless


def _eos_token_ids(folder: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    ids = None
    if (folder / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    if ids is None:
        ids = getattr(config.get_text_config(decoder=True), "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


@contextmanager
def _weight_progress(progress: Progress, size: int) -> Iterator[None]:
    """Report transformers' own progress bar over the weights. Its hook is set only during the load."""

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("desc") == "Loading weights" and args and hasattr(args[0], "__len__"):
            return _report_items(args[0], len(args[0]), progress, size)
        return factory(*args, **{**kwargs, "disable": True})

    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


def _report_items(items: Iterable[Any], total: int, progress: Progress, size: int) -> Iterator[Any]:
    shown = 0
    for done, item in enumerate(items):
        if (percent := 100 * done // total) > shown:
            shown = percent
            progress("weights", percent, size * done // total, size)
        yield item
