"""One request inside the engine: integers that only grow, and the lease on its pages."""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fairlead_worker.messages import Sampling

if TYPE_CHECKING:
    from fairlead_worker.cache.pages import KvLease


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way to its output.

    `cached <= computed <= len(tokens)` always. There are no phases: a request prefills while more than one token is uncomputed
    and decodes when exactly one is (the idea is vLLM V1's: computed tokens catch up with known tokens).
    """

    id: str
    tokens: "array[int]"
    """Prompt and output so far, uint32 (`array('I')`)."""
    prompt_length: int
    sampling: Sampling
    root: int
    arrival: int
    """Order of arrival, from the scheduler's counter."""
    priority: int = 0
    tenant: str = ""
    cached: int = 0
    """Leading tokens whose KV came from the prefix cache at the latest admission."""
    computed: int = 0
    """Leading tokens whose KV is in this request's pages."""
    first_cached: int | None = None
    """`cached` of the first admission, as reported to the client: recomputing after a retraction does not change it."""
    lease: "KvLease | None" = None
    retractions: int = 0
    stop_tokens: frozenset[int] = field(default_factory=frozenset)

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed
