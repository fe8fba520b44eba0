"""What files and settings decide before any weight is read."""

import json
import logging
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from transformers import AutoConfig, PreTrainedConfig

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.adapters import describe_unsupported, register_adapter
from fairlead_worker.model.dtype import choose_dtype
from fairlead_worker.model.families.registry import FAMILIES, find_definition
from fairlead_worker.model.formats.choose import check_checkpoint, ignore_kv_scheme
from fairlead_worker.model.formats.gguf import find_gguf
from fairlead_worker.model.packed import DTYPES
from fairlead_worker.model.rope import fix_alpha
from fairlead_worker.model.rope import max_model_len as context_length
from fairlead_worker.model.wrappers import plain_config, text_names
from fairlead_worker.native.library import native
from fairlead_worker.platform.isa import VARIABLE, cpu_level
from fairlead_worker.plugins import PluginError

logger = logging.getLogger(__name__)

_OTHER_HEAD: Final = re.compile(r"Classification|QuestionAnswering|Reward")
"""Part of an architecture's name whose head predicts no token. The rest of it would load as a causal LM or as an embedder."""
_LAYER = re.compile(r"(?:^|\.)(?:mtp|layers\.(\d+)\.)")


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

    @property
    def names_head(self) -> bool:
        """Return whether the files have to have a head. Others without one make embeddings only."""
        return self.is_wrapped or any("ForCausalLM" in name for name in self.config.architectures or ())

    def rename(self, names: Iterable[str]) -> dict[str, str]:
        """Return the decoder's tensors among those of the files: the name there -> the name here. Layers of MTP are left out."""
        definition = None if self.is_wrapped else find_definition(self.config)
        found = text_names(names) if self.is_wrapped else {name: name if definition is None else definition.rename(name) for name in names}
        layers = getattr(self.config.get_text_config(decoder=True), "num_hidden_layers", sys.maxsize)  # BLT, refused later, has none
        return {name: ours for name, ours in found.items() if not _is_mtp(ours, layers)}


def plan_load(uri: str, folder: Path, *, dtype: str, device: torch.device, max_model_len: int, quantization: str, ranks: int) -> LoadPlan:
    """Return how the model in `folder` is loaded; the arguments are those of `load_model`. `device` may be one that is not here.

    Raises ModelLoadError.
    """
    config, is_wrapped = _read_config(uri, folder, ranks)
    ignore_kv_scheme(config)
    fix_alpha(config)
    limit = context_length(uri, config, max_model_len)
    torch_dtype = choose_dtype(uri, dtype, config, device)
    native_quantization = quantization if quantization == "int8" or (quantization == "int4" and device.type == "cpu") else "none"
    if native_quantization != "none":
        _check_native(uri, quantization, torch_dtype, device)
    if (gguf := find_gguf(folder)) is not None:
        _check_gguf(uri, quantization, ranks)
    files = [] if gguf is not None else check_weights(uri, folder)
    return LoadPlan(config, is_wrapped, limit, torch_dtype, native_quantization, gguf, files)


def _read_config(uri: str, folder: Path, ranks: int) -> tuple[PreTrainedConfig, bool]:
    """Return the config of the decoder, and whether it is the text part of a model that reads more than text."""
    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(uri, f"config.json cannot be read: {error}") from error
    try:
        plain = plain_config(raw)
    except ValueError as error:
        raise ModelLoadError(uri, f"config.json: {error}") from error
    if (given := (plain[0] if plain else raw).get("quantization_config")) is not None:
        check_checkpoint(uri, given.get("quant_method", "unknown") if isinstance(given, dict) else "unknown", ranks)
    kind = raw.get("model_type") if plain is None else plain[0]["model_type"]
    try:
        known = isinstance(kind, str) and register_adapter(kind)
    except PluginError as error:
        raise ModelLoadError(uri, str(error)) from error
    if not known:
        raise ModelLoadError(uri, f"unsupported architecture: {describe_unsupported(raw)}")
    if other := next((name for name in raw.get("architectures") or () if _OTHER_HEAD.search(name)), ""):
        encoders = ", ".join(sorted(FAMILIES))
        raise ModelLoadError(
            uri, f"unsupported architecture: {other}: only encoders' heads are served ({encoders}); take one, or a causal LM"
        )
    try:
        if plain is not None:
            logger.info("model_type %s: %s is served, as %s", raw["model_type"], "its text part" if plain[1] else "it", kind)
            return AutoConfig.for_model(**plain[0]), plain[1]
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False), False
    except Exception as error:
        raise ModelLoadError(uri, f"config.json is not a valid {kind} config: {error}") from error


def _is_mtp(name: str, layers: int) -> bool:
    """Return whether a tensor is of multi-token prediction, beside a decoder of so many layers. DeepSeek V3 numbers its layers after
    these, and others call them `mtp`.
    """
    match = _LAYER.search(name)
    return match is not None and int(match[1] or layers) >= layers


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
