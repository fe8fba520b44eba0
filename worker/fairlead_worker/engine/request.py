"""One request inside the engine: integers that only grow, and the lease on its pages."""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fairlead_worker.messages import FinishReason, Sampling

if TYPE_CHECKING:
    from fairlead_worker.cache.prefix import Lease
    from fairlead_worker.cache.watch import Watch
    from fairlead_worker.engine.plan import Row
    from fairlead_worker.engine.speculation import Drafting


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
    """Lower is more urgent, as with vLLM."""
    tenant: str = ""
    cached: int = 0
    """Leading tokens whose KV came from the prefix cache at the latest admission."""
    computed: int = 0
    """Leading tokens whose KV is in this request's pages."""
    first_cached: int | None = None
    """`cached` of the first admission, as reported to the client: recomputing after a retraction does not change it."""
    lease: "Lease | None" = None
    """Its pages while it runs; None while it waits."""
    watch: "Watch | None" = None
    """What is cached of it while it waits; None while it runs."""
    retractions: int = 0
    preemptions: int = 0
    """Retractions for the sake of somebody of more priority."""
    charged: int = 0
    """Output tokens that its tenant's counter has; policy fair."""
    lost: int = 0
    """Tokens that were computed when it was retracted the last time."""
    stop_tokens: frozenset[int] = field(default_factory=frozenset)
    """Tokens that end it once `min_tokens` are out: its own, and the model's unless `ignore_eos`. The sampler masks them before that."""
    length_limit: int = 0
    """Tokens, prompt and output, at which it ends for length: from max_tokens and the model's longest sequence."""
    reserved_end: int = 0
    """Length at which the scheduler's reserve counts no more output for it; 0: it counts none."""
    row: "Row | None" = None
    """Its row of the decodes, the same object step after step; None while it prefills or waits."""
    alarm: int = 0
    """While `computed` stays below this, a decode step only adds a token: neither its length nor its reserve ends. 0: not known."""
    page_end: int = 0
    """`computed` at which its next page is full; kept while it decodes."""
    drafting: "Drafting | None" = None
    """What is known of how well its tokens are guessed; None until it speculates."""
    finish: FinishReason | None = None

    @property
    def reserved(self) -> int:
        """Output tokens still counted for it in the scheduler's reserve."""
        return self.reserved_end - len(self.tokens) if self.reserved_end else 0

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed
