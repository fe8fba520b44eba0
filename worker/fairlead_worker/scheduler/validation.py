"""Validates `Submit` messages and converts them to requests, before they change any state."""

from fairlead_index.hashing import tokens_from_bytes
from fairlead_worker.ipc.messages import Output, Sampling, Submit
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.request import Request


class InvalidRequest(ValueError):
    """A request that can never run on this engine. The message gives the reason and the numbers."""


def refusal(request_id: str, reason: str) -> Output:
    """Return the only output of a refused request."""
    return Output(request_id, b"", 0, finish="error", error=reason)


def validate(message: Submit, arrival: int, config: SchedulerConfig, pages: int, page_size: int) -> Request:
    """Convert a `Submit` to a request. Raises InvalidRequest if it could not run even alone on this engine."""
    if len(message.tokens) % 4:
        raise InvalidRequest(f"token ids come as uint32, but the prompt has {len(message.tokens)} bytes, no multiple of 4")
    tokens, sampling = tokens_from_bytes(message.tokens), message.sampling
    prompt = len(tokens)
    if not prompt:
        raise InvalidRequest("the prompt is empty: at least one token is needed")
    if message.pooling is not None:
        _check_pooled(prompt, config, pages * page_size)
        limit, stop = prompt, frozenset[int]()
    else:
        limit = _limit_length(prompt, sampling, config, pages, page_size)
        stop = frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else config.eos_token_ids)
    return Request(message, tokens, prompt, arrival, stop, limit)


def _limit_length(prompt: int, sampling: Sampling, config: SchedulerConfig, pages: int, page_size: int) -> int:
    """Return the tokens of prompt and output at which a request ends. Raises InvalidRequest if it cannot generate here."""
    if not config.generates:
        raise InvalidRequest("this model has no language-modelling head: it makes embeddings, scores or classes, and no text")
    if sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {sampling.max_tokens}")
    if sampling.prompt_logprobs is not None and not config.prompt_logprobs:
        raise InvalidRequest("log-probabilities of the prompt cannot be computed for this model: its head does not run apart from its body")
    if prompt >= config.max_model_len:
        raise InvalidRequest(
            f"the prompt has {prompt} tokens, but the longest sequence here, prompt and output, is {config.max_model_len}: shorten it"
        )
    limit = min(prompt + sampling.max_tokens, config.max_model_len)
    needed = -(-(limit - 1) // page_size)  # the last token's KV is never needed
    if needed > pages:
        raise InvalidRequest(
            f"prompt ({prompt} tokens) and output (up to {limit - prompt}) need {needed} KV pages of {page_size} tokens, "
            f"but the engine has {pages} in all ({pages * page_size} tokens): shorten the prompt or lower max_tokens"
        )
    return limit


def _check_pooled(prompt: int, config: SchedulerConfig, cached: int) -> None:
    """Check a pooling request, which ends with its prompt. `cached`: tokens that the pages hold. Raises InvalidRequest."""
    if not config.prompt_logprobs:
        raise InvalidRequest("embeddings cannot be computed for this model: its head does not run apart from its body")
    if prompt > (most := min(config.max_model_len, cached)):
        raise InvalidRequest(f"the text has {prompt} tokens, but the longest here is {most}: shorten it")
