"""Errors of requests from which no prompt can be built."""


class PromptError(ValueError):
    """No prompt can be built from the request. `field`: the wrong part of the request, by its name in the request."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class PromptTooLong(PromptError):
    """The prompt has more than `most` tokens and was not tokenized. `least`: a lower bound of its tokens."""

    def __init__(self, field: str, least: int, most: int) -> None:
        super().__init__(field, f"has at least {least} tokens, and at most {most} are taken")
        self.least, self.most = least, most
