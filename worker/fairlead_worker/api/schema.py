"""Request bodies as msgspec structs. Types and bounds are here; `generation/sampling.py` has the meaning."""

from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, inspect

from fairlead_common.json_size import JsonTooLarge, check_json, read_float
from fairlead_common.truncate import truncate
from fairlead_worker.api.errors import ApiError, invalid
from fairlead_worker.api.request_warnings import report_unknown_fields

Choices = Annotated[int, Meta(ge=1, le=128)]
Count = Annotated[int, Meta(ge=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=1024)]
"""Every step checks each of them until `min_tokens` tokens are generated."""
Limit = 2**31 - 1
"""Upper bound of counts that no model reaches: the engine's tensors hold 64 bits, and JSON any number."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(ge=0.01, le=100)]
"""Outside these bounds, a logit would leave the range of float32."""
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
BadWord = Annotated[str, Meta(min_length=1, max_length=128)]
RequestId = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,128}$")]
"""The same rule as for an X-Request-Id header, so that it fits a header and a log line."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every chunk has usage. As in vLLM, `continuous_usage_stats` alone has no effect."""
        return bool(self.include_usage and self.continuous_usage_stats)


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of all requests that the engine computes. `None` always means that the field is absent."""

    model: str | None = None
    user: Annotated[str, Meta(max_length=256)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=Limit)] | None = None
    truncation_side: Literal["left", "right"] | None = None


class CommonRequest(InferenceRequest, frozen=True, kw_only=True):
    """Fields of completions and chats."""

    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=Limit)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: StopTokenIds | None = None
    seed: Seed | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=Limit)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    prompt_logprobs: TopLogprobs | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    """SGLang's names of `guided_regex`, `guided_grammar` and `guided_json`."""
    bad_words: Annotated[list[BadWord], Meta(max_length=128)] | None = None
    """Each is searched for at every token."""
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=Limit)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: RequestId | None = None

    # Checked by `generation/unsupported_fields.py`.
    early_stopping: Any = None
    ec_transfer_params: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logprob_token_ids: Any = None
    logits_processors: Any = None
    mm_processor_kwargs: Any = None
    prompt_embeds: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    stop_regex: Any = None
    store: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None


class CompletionRequest(CommonRequest, frozen=True, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    logprobs: TopLogprobs | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """0: return the prompt only."""
    echo: bool | None = None
    best_of: Choices | None = None
    suffix: Any = None


class ChatRequest(CommonRequest, frozen=True, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Annotated[str, Meta(min_length=1)] | None = None
    documents: list[dict[str, Any]] | None = None
    echo: bool | None = None

    # Checked by `generation/unsupported_fields.py`.
    audio: Any = None
    media_io_kwargs: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class TokenizeRequest(msgspec.Struct, frozen=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: Annotated[str, Meta(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True):
    tokens: list[TokenId]
    model: str | None = None


class LoadLoraRequest(msgspec.Struct, frozen=True):
    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    """Replace the adapter that has this name."""


class UnloadLoraRequest(msgspec.Struct, frozen=True):
    lora_name: str


MAX_FIELDS = 1024
"""Fields of a request. The largest API has 60."""
Body = TypeVar("Body", bound=msgspec.Struct)


_DECODER: Final = msgspec.json.Decoder(float_hook=read_float)


def check_size(data: bytes, max_tokens: int = 0) -> None:
    """Raise ApiError 400 for a body with more nodes than a decoder may build. `max_tokens`: token ids of the longest prompt."""
    try:
        check_json(data, max_tokens)
    except JsonTooLarge as error:
        raise invalid(f"the body is too large to decode: {error}", code="request_too_large") from None


def parse(data: bytes, type: type[Body], max_tokens: int = 0) -> Body:
    """Decode `data` as `type`. Raise ApiError 400 that names the invalid field. Ignore unknown fields and report them.

    `max_tokens`: as for `check_size`.
    """
    check_size(data, max_tokens)
    try:
        raw = _DECODER.decode(data)
    except msgspec.ValidationError:  # a number that no type can hold
        raise _out_of_range_error(data, type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not JSON: {truncate(error)}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise invalid("the body must be a JSON object")
    if len(raw) > MAX_FIELDS:
        raise invalid(f"the body has {len(raw)} fields, and at most {MAX_FIELDS} are allowed: send fewer", code="request_too_large")
    if unknown := raw.keys() - set(type.__struct_fields__):
        report_unknown_fields(unknown)
    return convert(raw, type)


def convert(raw: dict[str, Any], type: type[Body]) -> Body:
    """Convert decoded fields to `type`. Raise ApiError 400 that names the invalid field."""
    try:
        return msgspec.convert(raw, type)
    except msgspec.ValidationError as error:
        raise _to_api_error(error, type) from None


def _to_api_error(error: msgspec.ValidationError, type: type[msgspec.Struct]) -> ApiError:
    message, _, path = str(error).rpartition(" - at `$")
    if not message:
        message, path = str(error), ""
    message = truncate(message)
    param = path.rstrip("`").lstrip(".") or _find_missing_field(message)
    if message.startswith("Invalid enum value") and (allowed := _list_allowed_values(param, type)):
        message += f"; give {allowed}"
    return invalid(f"{param or 'body'}: {message[:1].lower()}{message[1:]}", param=param)


def _out_of_range_error(data: bytes, type: type[Body]) -> ApiError:
    """Return the error for an out-of-range number. Only a decoder that knows the fields can name the field."""
    try:
        msgspec.json.decode(data, type=type)
    except msgspec.ValidationError as error:
        return _to_api_error(error, type)
    return invalid("the body has a number that is out of range")


def _list_allowed_values(field: str | None, type: type[msgspec.Struct]) -> str:
    """Return the values that an enumerated field accepts, for an error message."""
    (body,) = inspect.multi_type_info([type])
    assert isinstance(body, inspect.StructType)
    kinds = [kind for one in body.fields if one.name == field for kind in getattr(one.type, "types", (one.type,))]
    values = [value for kind in kinds if isinstance(kind, inspect.LiteralType) for value in kind.values]
    return " or ".join(repr(value) for value in values)


def _find_missing_field(message: str) -> str | None:
    """Return the field in "Object missing required field `tokens`"."""
    _, found, rest = message.partition("required field `")
    return rest.rstrip("`") if found else None
