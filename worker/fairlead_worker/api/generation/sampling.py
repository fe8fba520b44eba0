"""Convert request fields to sampling parameters, stop strings and limits. The same rules apply to completions and chats."""

import secrets
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fairlead_common.truncate import truncate
from fairlead_worker.api.errors import invalid, too_long
from fairlead_worker.api.generation.structured_outputs import parse_constraint
from fairlead_worker.api.generation.unsupported_fields import check_unsupported
from fairlead_worker.api.schema import ChatRequest, CommonRequest, CompletionRequest
from fairlead_worker.grammar.constraint import Constraint
from fairlead_worker.ipc.messages import Sampling

MAX_STOPS = 16
"""OpenAI allows 4. Each one costs a search of every piece of text."""
MAX_STOP_CHARACTERS = 256
"""Per stop string. While the text may be its prefix, each token costs as many comparisons."""
MAX_BIASES = 1024
"""OpenAI allows 300."""
MAX_BIAS = 100
"""OpenAI's bounds: at either end, a token is practically banned or forced."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions. A chat may continue to the end of the context."""
MIN_TOP_P = 1e-9
"""Stands for 0, which OpenAI allows: only the most probable token stays."""
_SEED_STEP = 0x9E3779B97F4A7C15
"""Odd and far from small multiples, so that the choice seeds of nearby seeds do not collide (splitmix64's golden ratio)."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What a request wants of its prompts, whatever they are: the sampling, the limits, and what is shown of the output."""

    max_tokens: int | None
    sampling: Sampling
    """`max_tokens` and `seed` are set later, for each prompt and choice."""
    seed: int
    stop_strings: tuple[str, ...]
    n: int
    best_of: int
    """Sequences to generate for each prompt. The `n` most likely ones are shown."""
    logprobs: bool
    """Show log-probabilities. `sampling.logprobs` is also set if only the `best_of` ranking needs them."""
    prompt_only: bool
    """Generate nothing (`max_tokens` 0): the engine's one token is not shown."""
    salt: str
    """Prompts with different salts share no KV. Prompts without a salt share the empty one."""
    tenant: str
    """Each tenant has a share of the batch (`scheduler/tenant_shares.py`)."""
    priority: int
    """Lower values run first."""
    constraint: Constraint | None = None
    """The format that the answer must have."""
    grammar: str = ""
    """`constraint` as the engine takes it: the result of `Worker.compile_grammar`."""
    bad_words: tuple[str, ...] = ()
    """Words that must not be generated. They become `sampling.bad_words` once the tokenizer is known."""
    thinking_token_budget: int | None = None
    """Most tokens of the reasoning; None: not bounded."""
    truncate_prompt_tokens: int | None = None
    """vLLM's `truncate_prompt_tokens`."""
    truncates_end: bool = False
    """Drop the end of a prompt that is truncated, not its beginning."""
    include_special_tokens: bool = False
    spaces_between_special_tokens: bool = True
    """True: join consecutive special tokens as the tokenizer does. False: put nothing between them."""
    include_stop_str: bool = False
    """Include the stop string or stop token in the text."""
    return_token_ids: bool = False
    """Return the token ids of the prompt and of the answer."""
    tokens_as_token_ids: bool = False
    """Name tokens `token_id:7` in log-probabilities, because token texts are not unique."""


def read_options(
    request: CompletionRequest | ChatRequest, defaults: Mapping[str, float], salt: str = "", tenant: str = "", priority: int = 0
) -> GenerationOptions:
    """Check rules across fields and return the options. `defaults`: values of absent fields. Raise ApiError 400.

    `salt`, `tenant`, `priority`: as `read_origin` returns them.
    """
    check_unsupported(request)
    if isinstance(request, ChatRequest):
        max_tokens, max_field = request.max_completion_tokens or request.max_tokens, "max_completion_tokens"
        if request.top_logprobs and not request.logprobs:
            raise invalid("top_logprobs: needs logprobs to be true", param="top_logprobs")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
    else:
        max_tokens, max_field = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens, "max_tokens"
        logprobs = request.logprobs
    prompt_logprobs = _count_prompt_logprobs(request)
    if max_tokens == 0 and prompt_logprobs is None and not (isinstance(request, CompletionRequest) and request.echo):
        raise invalid("max_tokens: 0 generates nothing; use it with echo or prompt_logprobs to get the prompt alone", param="max_tokens")
    n = request.n or 1
    best_of = _parse_best_of(request, n)
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(f"min_tokens: {min_tokens} is more than {max_field} {max_tokens}", param="min_tokens")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options: only with stream: true", param="stream_options")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        message = "stream_options.include_obfuscation: events are not padded; leave it out or give false"
        raise invalid(message, param="stream_options.include_obfuscation")
    seed = secrets.randbits(63) if request.seed is None else request.seed
    base = Sampling(
        max_tokens=0,
        temperature=_value_or_default(request.temperature, defaults, "temperature", 1.0),
        top_p=max(MIN_TOP_P, _value_or_default(request.top_p, defaults, "top_p", 1.0)),
        top_k=max(0, int(_value_or_default(request.top_k, defaults, "top_k", 0))),
        min_p=_value_or_default(request.min_p, defaults, "min_p", 0.0),
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=0 if logprobs is None and best_of > n else logprobs,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_value_or_default(request.repetition_penalty, defaults, "repetition_penalty", 1.0),
        logit_bias=() if request.logit_bias is None else _parse_logit_bias(request.logit_bias),
        allowed_token_ids=() if request.allowed_token_ids is None else _parse_allowed_token_ids(request.allowed_token_ids),
        prompt_logprobs=prompt_logprobs,
    )
    most = max_tokens if max_tokens is None else max(max_tokens, 1)
    prompt_only = max_tokens == 0
    return GenerationOptions(
        most,
        base,
        seed,
        () if request.stop is None else _parse_stop(request.stop),
        n,
        best_of,
        logprobs is not None,
        prompt_only,
        salt,
        tenant,
        priority,
        constraint=None if prompt_only else parse_constraint(request),
        bad_words=tuple(request.bad_words or ()),
        thinking_token_budget=None if request.thinking_token_budget == -1 else request.thinking_token_budget,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncates_end=request.truncation_side == "right",
        include_special_tokens=request.skip_special_tokens is False,
        spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
        include_stop_str=bool(request.include_stop_str_in_output),
        return_token_ids=bool(request.return_token_ids),
        tokens_as_token_ids=bool(request.return_tokens_as_token_ids),
    )


def _count_prompt_logprobs(request: CommonRequest) -> int | None:
    """Return the number of prompt log-probabilities as vLLM does: from its field, or for `echo` with `logprobs`."""
    if request.prompt_logprobs is not None:
        if request.stream:
            raise invalid("prompt_logprobs: only whole answers have them; leave stream out", param="prompt_logprobs")
        return request.prompt_logprobs
    return request.logprobs if isinstance(request, CompletionRequest) and request.echo else None


def _value_or_default(value: float | None, defaults: Mapping[str, float], field: str, neutral: float) -> float:
    return defaults.get(field, neutral) if value is None else value


def derive_seed(seed: int, choice: int) -> int:
    """Return the seed of one of n choices, in [0, 2^63). Choice 0 has the request's seed, so that n=1 equals the first of many."""
    return (seed + choice * _SEED_STEP) & (2**63 - 1)


def truncate_prompt(prompt: "array[int]", most: int, max_tokens: int | None, limit: int, from_end: bool = False) -> "array[int]":
    """Apply vLLM's `truncate_prompt_tokens`: keep `most` tokens, or with -1 as many as leave room for the answer.

    Keep the last ones, or with `from_end` the first ones. Raise ApiError 400.
    """
    if most == 0 or most > limit:
        raise invalid(f"truncate_prompt_tokens: {most} is neither -1 nor from 1 to {limit}", param="truncate_prompt_tokens")
    kept = max(1, limit - (max_tokens or 1) if most < 0 else most)
    return prompt[:kept] if from_end else prompt[-kept:]


def limit_max_tokens(max_tokens: int | None, prompt_tokens: int, limit: int, field: str, ends_at_context: bool = False) -> int:
    """Return how many tokens may follow the prompt. Raise ApiError 400 if the context cannot hold them. `field`: the prompt's field."""
    if prompt_tokens + 1 > limit:
        raise too_long(f"your prompt is too long: {prompt_tokens} tokens leave no room for an answer; shorten it", limit, field)
    if max_tokens is None or (ends_at_context and prompt_tokens + max_tokens > limit):
        return limit - prompt_tokens
    if prompt_tokens + max_tokens > limit:
        raise too_long(
            f"you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} of the prompt, {max_tokens} of the answer); lower one",
            limit,
            field,
        )
    return max_tokens


def _parse_stop(stop: str | list[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise invalid(f"stop: at most {MAX_STOPS} strings, not {len(stops)}", param="stop")
    if longest := next((stop for stop in stops if len(stop) > MAX_STOP_CHARACTERS), None):
        raise invalid(f"stop: a string of {len(longest)} characters; at most {MAX_STOP_CHARACTERS}", param="stop")
    if "" in stops:
        raise invalid("stop: an empty string would stop everything", param="stop")
    return stops


def _parse_best_of(request: CommonRequest, n: int) -> int:
    best_of = request.best_of if isinstance(request, CompletionRequest) and request.best_of is not None else n
    if best_of < n:
        raise invalid(f"best_of: {best_of} is less than n {n}", param="best_of")
    if best_of > n and request.stream:
        raise invalid("best_of: the best are known at the end only; leave stream out, or give the value of n", param="best_of")
    return best_of


def _parse_logit_bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """Parse OpenAI's format: the keys are token ids as JSON strings."""
    if len(given) > MAX_BIASES:
        raise invalid(f"logit_bias: at most {MAX_BIASES} tokens, not {len(given)}", param="logit_bias")
    biases: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid(
                f'logit_bias: {key[:40]!r} is not a token id; the keys are token ids, as in {{"50256": -100}}', param="logit_bias"
            )
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise invalid(f"logit_bias: {value} for token {truncate(key)} is not between -{MAX_BIAS} and {MAX_BIAS}", param="logit_bias")
        if int(key) in biases:
            raise invalid(f"logit_bias: token {truncate(int(key))} appears twice", param="logit_bias")
        biases[int(key)] = value
    return tuple(biases.items())


def _parse_allowed_token_ids(given: list[int]) -> tuple[int, ...]:
    if not given:
        raise invalid("allowed_token_ids: an empty list allows nothing; leave it out to allow every token", param="allowed_token_ids")
    return tuple(dict.fromkeys(given))


def check_vocabulary(sampling: Sampling, vocabulary: int, eos: Sequence[int]) -> None:
    """Raise ApiError 400 unless the request's token ids are in the vocabulary and leave a token to choose."""
    for field, tokens in (("logit_bias", [token for token, _ in sampling.logit_bias]), ("allowed_token_ids", sampling.allowed_token_ids)):
        if tokens and (largest := max(tokens)) >= vocabulary:
            raise invalid(f"{field}: token id {largest} is not in the vocabulary of {vocabulary}", param=field)
    ending = set(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos)
    if sampling.min_tokens and sampling.allowed_token_ids and ending.issuperset(sampling.allowed_token_ids):
        raise invalid(
            f"allowed_token_ids: only tokens that end the answer, but min_tokens is {sampling.min_tokens}", param="allowed_token_ids"
        )
