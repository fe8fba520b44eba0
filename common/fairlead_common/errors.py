"""Errors of requests from which no prompt can be built."""


class PromptError(ValueError):
    """No prompt can be built from the request. `field`: the wrong part of the request, by its name in the request."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class PromptTooLong(PromptError):
    """The prompt has more than `max_tokens` tokens. `min_tokens`: a lower bound of its tokens. `computed`: tokens computed to find it."""

    def __init__(self, field: str, min_tokens: int, max_tokens: int, computed: int = 0) -> None:
        super().__init__(field, f"has at least {min_tokens} tokens, and at most {max_tokens} are allowed")
        self.min_tokens, self.max_tokens, self.computed = min_tokens, max_tokens, computed
