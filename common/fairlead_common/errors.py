"""Errors of requests from which no prompt can be built."""


class PromptError(ValueError):
    """No prompt can be built from the request. `field`: the wrong part of the request, by its name in the request."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def exceeds_context(limit: int, detail: str) -> str:
    """Return the message for a prompt that exceeds the context length of `limit` tokens.

    It begins as OpenAI's message does: LiteLLM and agents search for these words, and then send a shorter prompt or use another model.
    """
    return f"This model's maximum context length is {limit} tokens. However, {detail}."


def too_many_tokens(min_tokens: int) -> str:
    return f"your prompt is too long: it has at least {min_tokens} tokens; shorten it"


class PromptTooLong(PromptError):
    """The prompt has more than `max_tokens` tokens. `min_tokens`: a lower bound of its tokens. `computed`: tokens computed to find it."""

    def __init__(self, field: str, min_tokens: int, max_tokens: int, computed: int = 0) -> None:
        super().__init__(field, f"has at least {min_tokens} tokens, and at most {max_tokens} are allowed")
        self.min_tokens, self.max_tokens, self.computed = min_tokens, max_tokens, computed
