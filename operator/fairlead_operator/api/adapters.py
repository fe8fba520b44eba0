"""`spec.model.adapters`: LoRA adapters that each worker loads before it is ready."""

from typing import Annotated

from pydantic import Field

from fairlead_operator.api.fields import Part, uri_schema, uri_validator


class Adapter(Part):
    """A LoRA adapter in the format of PEFT."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")] = Field(
        description='Value of "model" in requests that use this adapter.'
    )
    uri: Annotated[str, uri_validator("spec.model.adapters.uri"), uri_schema("spec.model.adapters.uri")] = Field(
        description="Folder that holds adapter_config.json, in the forms of spec.model.uri."
    )


SAME_NAMES = "spec.model.adapters must not contain a name twice, since requests select by name: rename one adapter"
MODELS_NAME = "spec.model.adapters must not contain the name of the model, since requests select by name: rename the adapter"
MAX_ADAPTERS = 64


def has_duplicate_names(adapters: list[Adapter]) -> bool:
    return len({one.name for one in adapters}) < len(adapters)
