"""Models of other packages: a class for a `model_type` that transformers does not know, registered as an entry point of that name."""

import logging
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from fairlead_worker.model.families.registry import FAMILIES
from fairlead_worker.plugins import MODEL_GROUP, Plugin, find_plugin, refuse

logger = logging.getLogger(__name__)


def register_adapter(model_type: str) -> bool:
    """Return True if there is a causal LM for `model_type`: one of transformers, or of a package, which is registered with transformers.

    transformers' causal classes of encoders (BertLMHeadModel) do not count: no published checkpoint has weights for them.

    Raises PluginError if the package's class cannot be used.
    """
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return True
    plugin = find_plugin(MODEL_GROUP, model_type)
    if plugin is None:
        return False
    model_class, config_class = _check(plugin)
    try:
        AutoConfig.register(model_type, config_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    except ValueError as error:
        raise refuse(plugin.entry, f"transformers does not accept {model_class.__name__}: {error}") from error
    logger.info("model_type %s: %s of package %s", model_type, model_class.__name__, plugin.package)
    return True


def describe_unsupported(config: Mapping[str, Any]) -> str:
    """Return why `register_adapter` knows no model for this config.json, and what can be served instead."""
    kind = config.get("model_type")
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        name = next(iter(config.get("architectures") or ()), kind)
        if kind in FAMILIES:
            return f"{name} is an encoder, which is served by one process: leave out --tensor-parallel-size"
        return f"{name} has an encoder (model_type {kind!r}), and the encoders served are {', '.join(sorted(FAMILIES))}"
    return f"transformers has no causal LM for model_type {kind!r}, and no installed package registers one"


def _check(plugin: Plugin) -> tuple[type[PreTrainedModel], type[PreTrainedConfig]]:
    """Return the plug-in's class and that of its config. Raises PluginError if it is no model of the entry point's `model_type`."""
    value = plugin.value
    if not isinstance(value, type) or not issubclass(value, PreTrainedModel):
        raise refuse(plugin.entry, f"{value!r} must be a subclass of transformers.PreTrainedModel")
    config_class = getattr(value, "config_class", None)
    named = getattr(config_class, "model_type", None)
    if not isinstance(config_class, type) or named != plugin.name:
        problem = f"config_class of {value.__name__} has model_type {named!r}: it must be the name of the entry point"
        raise refuse(plugin.entry, problem)
    return value, config_class
