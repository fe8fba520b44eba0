"""The outputs of one step."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from fairlead_index.hashing import token_bytes
from fairlead_worker.messages import Output
from fairlead_worker.scheduler.request import Request


@dataclass(slots=True)
class StepOutputs:
    """The outputs of one step. Decodes that got one token and continue, which are nearly all, are stored in columns without an `Output`
    object each."""

    full: list[Output] = field(default_factory=list)
    """Outputs with more than one plain token. First tokens of one step come in arrival order."""
    decoded: list[Request] = field(default_factory=list)
    """Requests that got one plain token, in arrival order."""
    tokens: list[int] = field(default_factory=list)
    """One token for each request in `decoded`."""

    def __len__(self) -> int:
        return len(self.full) + len(self.decoded)

    def __iter__(self) -> Iterator[Output]:
        for request, token in zip(self.decoded, self.tokens, strict=True):
            yield Output(request.id, token_bytes((token,)), request.first_cached or 0)
        yield from self.full
