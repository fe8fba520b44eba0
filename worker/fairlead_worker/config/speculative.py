"""`--speculative-config`: speculative decoding, with the keys of vLLM."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from fairlead_worker.config.values import ConfigObject, to_model_uri


class SpeculativeConfig(ConfigObject):
    """The keys of `--speculative-config`."""

    method: Annotated[
        Literal["ngram", "draft_model"],
        Field(description="ngram: search the request's own text; draft_model: run `model`, the default if `model` is given"),
    ]
    model: Annotated[str, Field(description="draft model with the same tokenizer, in the forms of --model")] = ""
    quantization: Annotated[
        Literal["none", "int8", "fp8", "int4"],
        Field(description="of the draft model, as --quantization; the served model in int4 can draft for itself"),
    ] = "none"
    num_speculative_tokens: Annotated[int, Field(ge=1, le=64, description="drafted tokens of a request in one step, at most")] = 5
    prompt_lookup_min: Annotated[int, Field(ge=1, description="ngram: tokens that must match")] = 2
    prompt_lookup_max: Annotated[int, Field(ge=1, description="ngram: tokens that are compared to choose among several matches")] = 5

    @model_validator(mode="before")
    @classmethod
    def _add_method(cls, data: Any) -> Any:
        return {"method": "draft_model", **data} if isinstance(data, dict) and data.get("model") else data

    @field_validator("model")
    @classmethod
    def _check_model(cls, value: str) -> str:
        return to_model_uri(value) if value else value

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if (self.method == "draft_model") != bool(self.model):
            raise ValueError(f"method {self.method!r} with model {self.model!r}: give a model with method 'draft_model', and only with it")
        if self.quantization != "none" and not self.model:
            raise ValueError(f"quantization {self.quantization!r} without a model: it is for method 'draft_model'")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min {self.prompt_lookup_min} is more than prompt_lookup_max {self.prompt_lookup_max}")
        return self
