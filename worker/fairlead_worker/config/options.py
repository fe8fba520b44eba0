"""How a field of the configuration is set: by a flag of a topic, or by its environment variable alone. No I/O."""

from typing import Any, Final, Literal, get_args

from pydantic import Field
from pydantic.fields import FieldInfo

Topic = Literal[
    "Model",
    "API server",
    "Chat and embeddings",
    "Scheduling",
    "KV cache",
    "Execution",
    "Parallelism",
    "LoRA",
    "Limits",
    "Observability",
]
TOPICS: Final[tuple[Topic, ...]] = get_args(Topic)
"""The argument groups of `--help`, in its order."""
ENV_PREFIX: Final = "FAIRLEAD_"


def flag(topic: Topic, description: str, **bounds: Any) -> Any:
    """Return the `Field` of a flag. `bounds`: keyword arguments of `pydantic.Field`."""
    return Field(description=description, json_schema_extra={"topic": topic}, **bounds)


def env_only(description: str, **bounds: Any) -> Any:
    """Return the `Field` of a setting without a flag: the operator and the local launcher set it, or it holds a secret."""
    return Field(description=description, **bounds)


def topic_of(field: FieldInfo) -> str:
    """Return the topic of a field's flag; empty if the field has no flag."""
    extra = field.json_schema_extra
    return str(extra.get("topic", "")) if isinstance(extra, dict) else ""


def flag_name(name: str) -> str:
    """Return the flag of the field `name`: `--max-num-seqs` of `max_num_seqs`."""
    return "--" + name.replace("_", "-")


def setting_name(name: str, field: FieldInfo) -> str:
    """Return how the field is set: its flag, or its variable if it has none."""
    return flag_name(name) if topic_of(field) else variable_name(name)


def variable_name(name: str) -> str:
    """Return the environment variable of the field `name`: `FAIRLEAD_MAX_NUM_SEQS` of `max_num_seqs`."""
    return ENV_PREFIX + name.upper()
