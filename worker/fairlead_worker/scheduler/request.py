"""One request in the engine: what it asks for, its tokens and progress, and the lease on its pages."""

from array import array
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from fairlead_worker.cache.node import PrefixMatch
from fairlead_worker.cache.prefix import Lease
from fairlead_worker.ipc.messages import FinishReason, Sampling, Submit, TokenLogprobs
from fairlead_worker.scheduler.pooling import Pool
from fairlead_worker.scheduler.prompt_logprobs import PromptLogprobs

by_arrival = attrgetter("arrival")
"""Sort key of requests."""


@dataclass(slots=True)
class History:
    """The admissions and preemptions of one request."""

    cached: int = 0
    """Leading tokens whose KV came from the prefix cache at the latest admission."""
    first_cached: int | None = None
    """`cached` of the first admission; None before it. Recomputing after a preemption does not change it."""
    first_loaded: int = 0
    """Tokens of `first_cached` whose KV came from the host tier."""
    first_hidden: int = 0
    """Tokens of `first_cached` that the index could not know (`cache/grouped.py`); below 0: tokens that it shows beyond
    (`cache/states.py`)."""
    awaiting_first_token: bool = True
    """No token since the latest admission: the next output carries timing and prompt logprobs too."""
    preemptions: int = 0
    priority_preemptions: int = 0
    """Preemptions in favour of a more urgent request; `preemptions` counts these too."""
    lost: int = 0
    """Tokens that were computed at the latest preemption."""
    lost_pages: bool = False
    """It waits because decodes ran out of pages."""

    @property
    def reported_cached(self) -> int:
        """`cached_tokens` of the answer."""
        return self.first_cached or 0


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and its output so far.

    `history.cached <= computed <= length` always holds. There are no phases: a request prefills while more than one token is
    uncomputed, and decodes when exactly one is. The idea is vLLM V1's: computed tokens catch up with known tokens.
    """

    submit: Submit
    """What the API asked for."""
    tokens: "array[int]"
    """Prompt and output so far, uint32 (`array('I')`)."""
    prompt_length: int
    arrival: int
    """Order of arrival, from the scheduler's counter."""
    stop_tokens: frozenset[int] = field(default_factory=frozenset)
    """Tokens that end the request after `min_tokens`: its own, and the model's unless `ignore_eos`. The sampler masks them before."""
    length_limit: int = 0
    """Tokens of prompt and output at which the request ends with "length": from max_tokens and the model's longest sequence."""
    id: str = field(init=False)
    sampling: Sampling = field(init=False)
    """Of `submit`, as `id` is: steps read both."""
    pool: Pool | None = field(init=False)
    """Pools the hidden states: the request has no output and ends with its prompt. None: the request generates."""
    computed: int = 0
    """Leading tokens whose KV is in this request's pages."""
    unread: int = 0
    """1 while a step in flight samples a token that the host does not know yet: it follows `tokens`. Else 0."""
    expected_pages: int = 0
    """Pages that its admission expected it to take."""
    fast_until: int = 0
    """`DecodeBatch`: a step that computes one token takes the fast path while `computed` is below this, because neither the length limit
    nor the reserve ends. 0: the slow path."""
    page_end: int = 0
    """`DecodeBatch`: `computed` at which the next page is full."""
    lease: Lease | None = None
    """The pages of a running request; None while it waits."""
    prefix_match: PrefixMatch | None = None
    """The cached prefix of a waiting request; None while it runs."""
    promised: "array[int] | None" = None
    """Hashes of the blocks that the index shows because this request computes them, from its first wait to its end."""
    reserved_end: int = 0
    """Length up to which the output reserve counts tokens for this request; 0: none."""
    finish: FinishReason | None = None
    history: History = field(default_factory=History)
    prompt_logprobs: PromptLogprobs | None = field(init=False)
    """None: not requested."""
    mask_seconds: float = 0.0
    """CPU time of filling the masks of its grammar. `sampling/grammars.py` adds to it."""
    sampler_state: dict[str, Any] = field(default_factory=dict)
    """What `sampling` keeps of it from step to step: token ids as arrays, counts of its tokens, and its place in the reasoning."""
    plain: bool = field(init=False)
    """Greedy sampling without logit changes, logprobs or grammar. Set once from `sampling`, so that steps need not compute it."""

    def __post_init__(self) -> None:
        submit = self.submit
        self.id, self.sampling = submit.id, submit.sampling
        self.plain = submit.sampling.plain and not submit.grammar
        self.pool = None if submit.pooling is None else Pool(submit.pooling, self.prompt_length)
        scores_prompt = submit.sampling.prompt_logprobs is not None and self.pool is None
        self.prompt_logprobs = PromptLogprobs(self.prompt_length) if scores_prompt else None

    @property
    def length(self) -> int:
        """Tokens so far, with an unread one."""
        return len(self.tokens) + self.unread

    def to_score(self, start: int, end: int) -> range:
        """Return the positions in `start` to `end` that need logits for prompt logprobs."""
        return self.prompt_logprobs.positions(start, end) if self.prompt_logprobs is not None else range(0)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Return the prompt logprobs once, to be sent with the first token."""
        return self.prompt_logprobs.take() if self.prompt_logprobs is not None else ()

    def to_pool(self, start: int, end: int) -> range:
        """Return the positions in `start` to `end` whose hidden states are pooled."""
        return self.pool.positions(start, end) if self.pool is not None else range(0)

    @property
    def reusable(self) -> int:
        """Leading tokens whose KV may come from the prefix cache, because neither their logits nor their hidden states are needed."""
        if self.pool is not None:
            return self.pool.reusable
        if self.prompt_logprobs is not None and not self.prompt_logprobs.is_complete:
            return self.prompt_logprobs.scored
        return len(self.tokens) - 1

    @property
    def reserved(self) -> int:
        """Output tokens that the output reserve still counts for this request."""
        return self.reserved_end - self.length if self.reserved_end else 0

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def uncomputed(self) -> int:
        return self.length - self.computed


def lease_of(request: Request) -> Lease:
    """Return the lease of a running request."""
    assert request.lease is not None, "a running request has a lease"
    return request.lease
