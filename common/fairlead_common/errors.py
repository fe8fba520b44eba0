"""Errors of a prompt that cannot be made."""


class PromptError(ValueError):
    """A prompt cannot be made of the request. `field` names the part of the request that is wrong, in the request's own terms."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class PromptTooLong(PromptError):
    """The prompt is sure to have more than `most` tokens, and was not tokenized. `least`: no more than it has."""

    def __init__(self, field: str, least: int, most: int) -> None:
        super().__init__(field, f"has at least {least} tokens, and at most {most} are taken")
        self.least, self.most = least, most
