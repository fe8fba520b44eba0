"""What a caller of this room can act on."""


class PromptError(ValueError):
    """A prompt cannot be made of the request. `field` names the part of the request that is wrong, in the request's own terms."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class IndexUnavailable(Exception):
    """The index did not answer in time. Steer without it: it never decides whether a request is served."""
