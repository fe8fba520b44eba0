"""`spec.model.adapters`: LoRA adapters that the workers load before they are ready."""

from typing import Annotated

from pydantic import Field

from fairlead_operator.api.fields import Part, known_uri, uri_schema


class Adapter(Part):
    """A LoRA adapter in PEFT's format. Requests choose it by giving its name as "model"."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")] = Field(
        description='What clients send as "model".'
    )
    uri: Annotated[str, known_uri("spec.model.adapters.uri"), uri_schema("spec.model.adapters.uri")] = Field(
        description="As spec.model.uri: the folder with adapter_config.json."
    )


SAME_NAMES = "spec.model.adapters needs a name of its own for each adapter: requests choose by name"
MODELS_NAME = "spec.model.adapters may not have the model's own name: requests choose by name"
MOST = 64


def named_twice(adapters: list[Adapter]) -> bool:
    return len({one.name for one in adapters}) < len(adapters)


def unnamed(model: str, name: str) -> str:
    """In CEL: no adapter of `model` is called `name`."""
    return f"!has({model}.adapters) || !{model}.adapters.exists(one, one.name == {name})"
