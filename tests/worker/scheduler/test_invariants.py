"""Any arrivals, aborts and steps in any order: no page is lost or shared wrongly, and every answer is the reference's."""

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from tests.worker.scheduler.engine_model import VOCABULARY, EngineModel

from fairlead_common.scheduling_policy import POLICIES
from fairlead_worker.cache.groups import CacheGroups
from fairlead_worker.ipc.messages import PoolingKind

STEMS = [[(stem * 31 + 11 * i) % 23 for i in range(80)] for stem in range(3)]
STEMS.append(STEMS[0][:20] + STEMS[1][20:])  # parts from the first one on the way


@dataclass(frozen=True)
class Arrival:
    stem: int
    shared: int
    suffix: tuple[int, ...]
    max_tokens: int
    root: int
    ignore_eos: bool
    min_tokens: int
    stop: tuple[int, ...]
    priority: int
    tenant: str
    scored: bool
    pooling: PoolingKind | None
    adapter: bool

    def submit(self, machine: EngineModel) -> tuple[str, int]:
        """Ask the machine for it; lengths mostly fit alone, and seldom together. The request's name, and its tokens at most."""
        room = min(machine.cache.longest, machine.cache.pool.total) * machine.cache.page_size
        prompt = STEMS[self.stem][: self.shared % (room // 2)] + list(self.suffix) or [1]
        max_tokens = 1 + self.max_tokens % (room // 2)
        name = machine.submit(
            prompt,
            max_tokens,
            root=self.root + (10 if self.adapter else 0),  # the API derives the root number from the adapter too
            adapter=int(self.adapter),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop,
            priority=self.priority,
            tenant=self.tenant,
            prompt_logprobs=0 if self.scored and not self.pooling else None,
            pooling=self.pooling,
        )
        return name, len(prompt) + max_tokens


@dataclass(frozen=True)
class Abort:
    which: int


@dataclass(frozen=True)
class Steps:
    count: int
    abort: int | None


arrivals = st.builds(
    Arrival,
    stem=st.integers(0, len(STEMS) - 1),
    shared=st.one_of(st.integers(0, 80), st.sampled_from([5, 17, 32])),
    suffix=st.one_of(st.just(()), st.lists(st.integers(0, 5), max_size=6).map(tuple)),  # so that some prompts are equal
    max_tokens=st.integers(1, 40),
    root=st.sampled_from([1, 1, 1, 2]),
    ignore_eos=st.sampled_from([True, True, True, False]),
    min_tokens=st.sampled_from([0, 0, 5]),
    stop=st.sampled_from([(), (), (3, 9)]),
    priority=st.sampled_from([0, 0, -1, 5]),
    tenant=st.sampled_from(["", "a", "b"]),
    scored=st.sampled_from([False, False, False, True]),
    pooling=st.sampled_from([None] * 10 + ["last", "mean"]),
    adapter=st.sampled_from([False, False, False, True]),
)
events = st.lists(
    st.one_of(
        arrivals,
        arrivals,
        arrivals,
        st.builds(Abort, st.integers(0, 200)),
        st.builds(Steps, st.integers(1, 12), st.sampled_from([None] * 9 + [0, 1, 3, 7])),
    ),
    min_size=15,
    max_size=60,
)

cache_groups = st.builds(
    CacheGroups,
    full=st.sampled_from([0, 1, 1]),
    windowed=st.sampled_from([1, 2, 3]),
    window=st.sampled_from([1, 5, 16, 40]),
    chunked=st.booleans(),
)

often = settings(
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(often, max_examples=60)
@given(
    events=events,
    pages=st.integers(8, 64),
    page_size=st.sampled_from([1, 4, 16]),
    chunk=st.sampled_from([-1, 1, 8, 16, 64]),
    policy=st.sampled_from(POLICIES),
    idle_prefill_chunks=st.sampled_from([1, 1, 5]),
    enable_mixed_chunk=st.booleans(),
    itl_target_ms=st.sampled_from([0, 0, 10, 300]),
    noise=st.randoms(use_true_random=False),
    max_prefill_tokens=st.sampled_from([8, 64, 8192]),
    prefill_max_requests=st.sampled_from([0, 0, 1, 2]),
    max_num_seqs=st.sampled_from([1, 3, 64]),
    dedupe_tokens=st.sampled_from([0, 1, 32]),
    max_preemptions=st.sampled_from([0, 1, 3]),
    max_bypass=st.sampled_from([0, 2, 64]),
    admission_scan_limit=st.sampled_from([1, 3, 16]),
    match_refresh_limit=st.sampled_from([0, 1, 64]),
    initial_new_token_ratio=st.sampled_from([0.0, 0.7]),
    speculative_method=st.sampled_from(["none", "ngram", "draft"]),
    speculative_num_tokens=st.sampled_from([1, 3, 20]),
    speculative_ngram_min=st.sampled_from([1, 2]),
    acceptance=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_no_page_is_lost_or_shared_wrongly(events, pages, page_size, chunk, policy, itl_target_ms, noise, acceptance, **limits):
    limits["itl_target_ms"] = itl_target_ms if chunk > 0 else 0
    machine = EngineModel(pages, page_size, chunked_prefill_size=chunk, policy=policy, max_model_len=110, **limits)
    machine.seconds = lambda plan: 0.001 * (1 + plan.prefill_tokens) * noise.choice([0, 1, 1, 1, 100])
    machine.guess = lambda right: right if noise.random() < acceptance else noise.randrange(VOCABULARY)
    play(machine, events)


@settings(often, max_examples=60)
@given(
    events=events,
    pages=st.integers(8, 24),
    page_size=st.sampled_from([1, 4]),
    host_slots=st.sampled_from([1, 2, 7, 20, 64]),
    chunk=st.sampled_from([-1, 4, 16]),
    policy=st.sampled_from(POLICIES),
    enable_mixed_chunk=st.booleans(),
    dedupe_tokens=st.sampled_from([1, 32]),
    initial_new_token_ratio=st.sampled_from([0.0, 0.7]),
    speculative_method=st.sampled_from(["none", "ngram", "draft"]),
)
def test_no_page_is_lost_or_shared_wrongly_with_a_host_tier(events, pages, page_size, host_slots, chunk, policy, **limits):
    """The same where the device is nearly always full: pages go to the host, come back, and are given up there."""
    play(
        EngineModel(pages, page_size, host_slots=host_slots, chunked_prefill_size=chunk, policy=policy, max_model_len=110, **limits), events
    )


def play(
    machine: EngineModel, events: list[Arrival | Abort | Steps], between: Callable[[], object] = lambda: None, rounds: int = 10
) -> None:
    """Everything that happens, then to the end, with every invariant checked after every step. `rounds`: at most, for each token."""
    names: list[str] = []
    work = 0
    for happening in events:
        if isinstance(happening, Arrival):
            name, tokens = happening.submit(machine)
            names.append(name)
            work += tokens
        elif isinstance(happening, Abort) and happening.which < len(names):
            machine.abort(names[happening.which])
        elif isinstance(happening, Steps):
            for _ in range(happening.count):
                machine.step(names[happening.abort % len(names)] if names and happening.abort is not None else None)
                machine.check()
        machine.check()
        between()
    machine.run(steps=1000 + rounds * work)
    machine.rest()
    machine.check_answers()
    load = machine.scheduler.load()
    event(f"preempted: {load.preemptions > 0}")
    event(f"evicted: {load.evicted_pages > 0}")
    event(f"cached: {load.cached_tokens > 0}")
    if load.host is not None:
        event(f"host hits: {load.host.cached_tokens > 0}, given up: {load.host.dropped > 0}")
    event(f"accepted: {load.drafts is not None and load.drafts.accepted > 0}")
    assert load.running == load.waiting == load.backlog_tokens == 0
    assert load.pages_free == load.pages_total, "with no request left, every page can be had"
    assert all(told.finish for told in machine.told.values()), "every request ends"
    for told in machine.told.values():
        if told.finish in ("stop", "length") and told.submit.sampling.prompt_logprobs is not None:
            assert told.scores == list(range(len(told.submit.tokens) // 4 - 1)), "each position once, and in order"
        if told.finish == "stop" and (kind := told.submit.pooling):
            length = len(told.submit.tokens) // 4
            assert told.pooled == list(range(length))[0 if kind == "mean" else -1 :], "and so it is pooled"


@settings(often, max_examples=60)
@given(
    events=events,
    pages=st.integers(8, 64),
    page_size=st.sampled_from([1, 4, 16]),
    block_pages=st.sampled_from([1, 2, 4]),
    groups=cache_groups,
    host_slots=st.sampled_from([0, 0, 1, 4, 11, 60, 400]),
    chunk=st.sampled_from([-1, 1, 8, 16, 64]),
    policy=st.sampled_from(POLICIES),
    idle_prefill_chunks=st.sampled_from([1, 5]),
    enable_mixed_chunk=st.booleans(),
    dedupe_tokens=st.sampled_from([0, 1, 32]),
    max_num_seqs=st.sampled_from([3, 64]),
    initial_new_token_ratio=st.sampled_from([0.0, 0.7]),
    speculative_method=st.sampled_from(["none", "ngram"]),
)
def test_no_page_is_lost_or_shared_wrongly_in_groups(events, pages, page_size, groups, chunk, policy, **limits):
    machine = EngineModel(
        pages * groups.count,
        page_size,
        groups=groups,
        chunked_prefill_size=chunk,
        policy=policy,
        max_model_len=110,
        **limits,
    )
    play(machine, events)


@settings(often, max_examples=60)
@given(
    events=events,
    pages=st.integers(8, 64),
    page_size=st.sampled_from([1, 4, 16]),
    block_pages=st.sampled_from([1, 2, 4]),
    snapshots=st.sampled_from([1, 2, 5, 100]),
    host_slots=st.sampled_from([0, 0, 7]),
    chunk=st.sampled_from([-1, 1, 8, 16, 64]),
    policy=st.sampled_from(POLICIES),
    idle_prefill_chunks=st.sampled_from([1, 5]),
    enable_mixed_chunk=st.booleans(),
    max_num_seqs=st.sampled_from([1, 3, 64]),
    initial_new_token_ratio=st.sampled_from([0.0, 0.7]),
    speculative_method=st.sampled_from(["none", "ngram", "draft"]),
    acceptance=st.sampled_from([0.0, 0.5, 1.0]),
    noise=st.randoms(use_true_random=False),
)
def test_no_state_is_lost_or_shared_wrongly(events, pages, page_size, chunk, policy, acceptance, noise, **limits):
    """The same with recurrent layers: slots for running requests, snapshots and drafted tokens."""
    machine = EngineModel(pages, page_size, chunked_prefill_size=chunk, policy=policy, max_model_len=110, **limits)
    machine.guess = lambda right: right if noise.random() < acceptance else noise.randrange(VOCABULARY)
    play(machine, events)
