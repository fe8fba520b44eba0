"""One request inside the engine: integers that only grow, and the lease on its pages."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fairlead_worker.messages import FinishReason, Sampling, TokenLogprobs

if TYPE_CHECKING:
    from fairlead_worker.cache.node import PrefixMatch
    from fairlead_worker.cache.prefix import Lease
    from fairlead_worker.scheduler.plan import Row
    from fairlead_worker.scheduler.pooling import Pool
    from fairlead_worker.scheduler.speculation import Drafting


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
    adapter: int = 0
    """Number of the LoRA adapter that it is computed with; 0: none."""
    grammar: str = ""
    """What its output must be; empty: anything. Who follows it through its output is `execution/grammars.py`."""
    pool: "Pool | None" = None
    """Its hidden states are wanted, and no output: it ends with its prompt. None: it generates."""
    cached: int = 0
    """Leading tokens whose KV came from the prefix cache at the latest admission."""
    computed: int = 0
    """Leading tokens whose KV is in this request's pages."""
    first_cached: int | None = None
    """`cached` of the first admission, as reported to the client: recomputing after a retraction does not change it."""
    first_loaded: int = 0
    """Of `first_cached`, the tokens whose KV came back from the host tier."""
    lease: "Lease | None" = None
    """Its pages while it runs; None while it waits."""
    watch: "PrefixMatch | None" = None
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
    """While `computed` stays below this, a decode step adds one token at most, with nothing else to tell: neither its length nor its
    reserve ends, and nothing was guessed. 0: look at it."""
    silent: bool = True
    """No token since its admission: there is more to tell with the next one."""
    page_end: int = 0
    """`computed` at which its next page is full; kept while it decodes."""
    drafting: "Drafting | None" = None
    """What is known of how well its tokens are guessed; None until it speculates."""
    finish: FinishReason | None = None
    scored: int = 0
    """Leading prompt positions whose logits were used for the log-probability of the token after them; grows over retractions too."""
    scores: list[TokenLogprobs] = field(default_factory=list)
    """What came of them, until it leaves with the first token."""
    plain: bool = False
    """Its next token is the likeliest one, with nothing to change or to tell: set from `sampling`, so that a step need not ask."""

    def __post_init__(self) -> None:
        self.plain = self.sampling.plain and not self.grammar

    @property
    def scoring(self) -> bool:
        """Log-probabilities of its prompt are wanted, and some are missing."""
        return self.sampling.prompt_logprobs is not None and self.scored < self.prompt_length - 1

    def to_score(self, start: int, end: int) -> range:
        """Of the positions computed now, from `start` to `end`, those whose logits are wanted: each once, however often it is computed."""
        return range(max(start, self.scored), min(end, self.prompt_length - 1)) if self.scoring else range(0)

    def score(self, scores: Sequence[TokenLogprobs]) -> None:
        """What came of `to_score`."""
        self.scores += scores
        self.scored += len(scores)

    def take_scores(self) -> tuple[TokenLogprobs, ...]:
        """What is to be told with its first token, once."""
        if not self.scores:
            return ()
        scores, self.scores = self.scores, []
        return tuple(scores)

    def to_pool(self, start: int, end: int) -> range:
        """Of the positions computed now, those whose hidden states are wanted."""
        return self.pool.wanted(start, end) if self.pool is not None else range(0)

    @property
    def reusable(self) -> int:
        """Leading tokens whose KV may come from the prefix cache: neither their logits nor their hidden states are wanted (any more)."""
        if self.pool is not None:
            return self.pool.reusable
        return self.scored if self.scoring else len(self.tokens) - 1

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


def lease_of(request: Request) -> "Lease":
    """Of a running request."""
    assert request.lease is not None, "a running request has a lease"
    return request.lease
