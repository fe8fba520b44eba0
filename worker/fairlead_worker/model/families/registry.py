"""The families of our own models, by the `model_type` of their config.json."""

from collections.abc import Callable
from functools import cache
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fairlead_worker.model.decoder import Decoder
from fairlead_worker.model.definition import Definition
from fairlead_worker.model.families import (
    cohere,
    deepseek,
    experts,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt2,
    granite,
    lfm2,
    llama,
    llama4,
    longcat,
    mamba,
    mamba1,
    nemotron,
    neox,
    qwen_hybrid,
    zamba2,
)
from fairlead_worker.model.families.bert import Bert, Roberta
from fairlead_worker.model.families.modernbert import ModernBert
from fairlead_worker.model.layers.mlp import ACTIVATIONS

Encoder = Bert | ModernBert
FAMILIES: dict[str, type[Encoder]] = {
    "bert": Bert,
    "camembert": Roberta,
    "modernbert": ModernBert,
    "roberta": Roberta,
    "xlm-roberta": Roberta,
}
"""The encoders."""
DECODERS: dict[str, Callable[[Any], Definition | None]] = {
    "apertus": llama.apertus,
    "arcee": llama.arcee,
    "axk1": deepseek.deepseek_v3,
    "bamba": mamba.bamba,
    "cohere": cohere.cohere,
    "cohere2": cohere.cohere2,
    "cwm": llama.cwm,
    "deepseek_v2": deepseek.deepseek_v2,
    "deepseek_v3": deepseek.deepseek_v3,
    "dots1": experts.qwen3_moe,
    "ernie4_5": llama.ernie,
    "ernie4_5_moe": experts.ernie_moe,
    "exaone4": llama.exaone4,
    "exaone_moe": experts.exaone_moe,
    "falcon_h1": mamba.falcon_h1,
    "falcon_mamba": mamba1.falcon_mamba,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3,
    "gemma3n_text": gemma3n.gemma3n,
    "gemma4_text": gemma4.gemma4,
    "gemma4_unified_text": gemma4.gemma4,
    "glm": glm.glm,
    "glm4": glm.glm4,
    "glm4_moe": glm.glm4_moe,
    "glm4_moe_lite": deepseek.deepseek_v3,
    "gpt-sw3": gpt2.gpt2,
    "gpt2": gpt2.gpt2,
    "gpt_bigcode": gpt2.gpt_bigcode,
    "gpt_neox": neox.gpt_neox,
    "gpt_oss": experts.gpt_oss,
    "granite": granite.granite,
    "granite_swa": granite.granite_swa,
    "granitemoe": granite.granite_moe,
    "granitemoeshared": granite.granite_moe_shared,
    "granitemoehybrid": mamba.granite_hybrid,
    "helium": llama.helium,
    "hunyuan_v1_dense": llama.hunyuan,
    "hy_v3": experts.qwen3_moe,
    "internlm3": llama.llama,
    "iquestcoder": llama.llama,
    "jais2": neox.jais2,
    "jamba": mamba1.jamba,
    "kimi_linear": deepseek.kimi_linear,
    "lfm2": lfm2.lfm2,
    "lfm2_moe": lfm2.lfm2_moe,
    "llama": llama.llama,
    "llama4_text": llama4.llama4,
    "longcat_flash": longcat.longcat_flash,
    "mamba": mamba1.mamba,
    "mamba2": mamba.mamba2,
    "minicpm3": deepseek.minicpm3,
    "minimax_m2": experts.minimax_m2,
    "ministral": llama.mistral,
    "ministral3": llama.ministral3,
    "mistral": llama.mistral,
    "mixtral": experts.mixtral,
    "nanochat": llama.nanochat,
    "nemotron": nemotron.nemotron,
    "nemotron_h": nemotron.nemotron_h,
    "olmo": neox.olmo,
    "olmo2": llama.olmo2,
    "olmo3": llama.olmo3,
    "olmo_hybrid": qwen_hybrid.olmo_hybrid,
    "olmoe": experts.olmoe,
    "opt": gpt2.opt,
    "persimmon": neox.persimmon,
    "phi": neox.phi,
    "phi3": llama.phi3,
    "qwen2": llama.qwen2,
    "qwen2_moe": experts.qwen2_moe,
    "qwen3": llama.qwen3,
    "qwen3_moe": experts.qwen3_moe,
    "qwen3_5_moe_text": qwen_hybrid.qwen3_5_moe,
    "qwen3_5_text": qwen_hybrid.qwen3_5,
    "qwen3_next": qwen_hybrid.qwen3_next,
    "seed_oss": llama.seed_oss,
    "smollm3": llama.smollm3,
    "solar_open": glm.glm4_moe,
    "stablelm": neox.stablelm,
    "starcoder2": llama.starcoder2,
    "vaultgemma": gemma.vaultgemma,
    "youtu": deepseek.youtu,
    "zamba2": zamba2.zamba2,
}
"""The decoders. A function returns None for a config that has something else too, which transformers' own class then runs."""
OF_LOADING = ("_keep_in_fp32_modules_strict", "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected")
"""What transformers' class says of a family's checkpoints: corrections of a router stay in float32, A.X K1 has none, and so on."""


def find_definition(config: PreTrainedConfig) -> Definition | None:
    """Return what a decoder computes; None for a family or a config that is not ours."""
    definition = DECODERS.get(config.model_type, lambda _: None)(config)
    return None if definition is None or not _computes(definition) else definition


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return our class of a decoder; transformers' own, the generic path, of a family or a config that is not ours.

    It is transformers' too where its reader of torchao's files would have to rename their tensors, which it does not.
    """
    definition = find_definition(config)
    if definition is None or (definition.names and hasattr(config, "quantization_config")):
        family: type[PreTrainedModel] = AutoModelForCausalLM._model_mapping[type(config)]
        return family
    return _decoder_class(config.model_type, type(config))  # type: ignore[arg-type]  # a class is hashable


def _computes(definition: Definition) -> bool:
    """Return whether layers of our own have the config's activations: recurrent ones have silu alone, as all that were published."""
    config, recurrence = definition.config, definition.recurrence
    known = definition.activation in ACTIVATIONS or (definition.activation == "xielu" and definition.plain_mlp is not None)
    if recurrence is None:
        return known
    return known and (recurrence.activation or getattr(config, "mamba_hidden_act", None) or getattr(config, "hidden_act", "silu")) == "silu"


@cache
def _decoder_class(model_type: str, config_class: type[PreTrainedConfig]) -> type[Decoder]:
    family = AutoModelForCausalLM._model_mapping[config_class]
    prefix = "model" if family.base_model_prefix == "language_model" else family.base_model_prefix  # Llama 4 says so, and has `model`
    members = {
        "define": staticmethod(DECODERS[model_type]),
        "config_class": config_class,
        "base_model_prefix": prefix,
        "__module__": __name__,
    }
    members |= {name: getattr(family, name) for name in OF_LOADING}
    if prefix != "model":
        members["model"] = property(lambda model: model._modules[prefix])
    return type(str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]), (Decoder,), members)
