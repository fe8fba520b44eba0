"""What a step brought to whom."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from fairlead_index.hashing import token_bytes
from fairlead_worker.messages import Output
from fairlead_worker.scheduler.request import Request


@dataclass(slots=True)
class StepOutputs:
    """A collection of `Output`s, most of which are never made: of a decode that got one token and goes on, as nearly all do, its request
    and the token are noted, and they go out together."""

    full: list[Output] = field(default_factory=list)
    """To the others. First tokens of one step come in the order of arrival."""
    decoded: list[Request] = field(default_factory=list)
    """In the order of arrival."""
    tokens: list[int] = field(default_factory=list)
    """Of the `decoded`, one each."""

    def __len__(self) -> int:
        return len(self.full) + len(self.decoded)

    def __iter__(self) -> Iterator[Output]:
        for request, token in zip(self.decoded, self.tokens, strict=True):
            yield Output(request.id, token_bytes((token,)), request.first_cached or 0)
        yield from self.full
