"""Models of other packages: a class for a `model_type` that transformers does not know, registered as an entry point of that name."""

import logging

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fairlead_worker.plugins import MODEL_GROUP, Plugin, find_plugin, refuse

logger = logging.getLogger(__name__)


def register_adapter(model_type: str) -> bool:
    """Return True if there is a causal LM for `model_type`: one of transformers, or of a package, which is registered with transformers.

    Raises PluginError if the package's class cannot be used.
    """
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return True
    plugin = find_plugin(MODEL_GROUP, model_type)
    if plugin is None:
        return False
    model_class, config_class = _check(plugin)
    try:
        AutoConfig.register(model_type, config_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    except ValueError as error:
        raise refuse(MODEL_GROUP, plugin, f"transformers does not accept {model_class.__name__}: {error}") from error
    logger.info("model_type %s: %s of package %s", model_type, model_class.__name__, plugin.package)
    return True


def _check(plugin: Plugin) -> tuple[type[PreTrainedModel], type[PreTrainedConfig]]:
    """Return the plug-in's class and that of its config. Raises PluginError if it is no model of the entry point's `model_type`."""
    value = plugin.value
    if not isinstance(value, type) or not issubclass(value, PreTrainedModel):
        raise refuse(MODEL_GROUP, plugin, f"{value!r} must be a subclass of transformers.PreTrainedModel")
    config_class = getattr(value, "config_class", None)
    named = getattr(config_class, "model_type", None)
    if not isinstance(config_class, type) or named != plugin.name:
        problem = f"config_class of {value.__name__} has model_type {named!r}: it must be the name of the entry point"
        raise refuse(MODEL_GROUP, plugin, problem)
    return value, config_class
