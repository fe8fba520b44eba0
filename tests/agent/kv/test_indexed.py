"""The index shows what the engine holds and what requests promise, and its set is always prefix-closed."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.agent.kv.engine_pool import BLOCK, Pool, Traffic, root_of
from tests.agent.kv.test_blocks import Index, decode

from fairlead_agent.kv.blocks import EngineBlocks
from fairlead_agent.kv.indexed import IndexedBlocks, Promise
from fairlead_index.hashing import block_hashes

PROMPT = block_hashes(root_of("", ""), list(range(4 * BLOCK)), BLOCK)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1 << 30), size=st.integers(12, 60), steps=st.integers(1, 100), resets=st.booleans())
def test_the_index_shows_held_and_promised_blocks(seed: int, size: int, steps: int, resets: bool) -> None:
    draw, pool, index = random.Random(seed), Pool(size), Index()
    indexed = IndexedBlocks(index, 10_000)
    traffic, blocks = Traffic(pool, seed), EngineBlocks(BLOCK, root_of, indexed)
    open_promises: list[tuple[Promise, list[int]]] = []
    for step in range(steps):
        traffic.step()
        blocks.apply(decode(pool.take_events()))
        if resets and step == steps // 2:
            blocks.mark_uncertain()
            assert not index.held
            break
        chains = [*pool.chains().values(), list(PROMPT)]
        if draw.random() < 0.6 and (promise := indexed.promise(chosen := draw.choice(chains))) is not None:
            open_promises.append((promise, chosen))
        if open_promises and draw.random() < 0.5:
            promise, _ = open_promises.pop(draw.randrange(len(open_promises)))
            promise.withdraw()
        assert index.held == pool.usable.union(*(hashes for _, hashes in open_promises))
        assert all(indexed.count(hashes) == len(hashes) for _, hashes in open_promises)
    for promise, _ in open_promises:
        promise.withdraw()
    assert index.held == (set() if resets else pool.usable)


def test_a_promise_ends_for_its_own_request_only() -> None:
    index = Index()
    indexed = IndexedBlocks(index, 100)
    first, second = indexed.promise(PROMPT), indexed.promise(PROMPT[:2])
    assert first is not None and second is not None and index.held == set(PROMPT)
    first.withdraw()
    assert index.held == set(PROMPT[:2])
    second.withdraw()
    assert not index.held


def test_a_computed_block_stays_and_an_evicted_one_goes_with_its_promise() -> None:
    index = Index()
    indexed = IndexedBlocks(index, 100)
    promise = indexed.promise(PROMPT)
    assert promise is not None
    indexed.store(list(PROMPT), 0)
    indexed.remove([PROMPT[3]])
    assert index.held == set(PROMPT), "the request that promises the block still computes it"
    promise.withdraw()
    assert index.held == set(PROMPT[:3])


def test_more_blocks_than_the_engine_can_hold_are_not_promised() -> None:
    index = Index()
    indexed = IndexedBlocks(index, 4)
    first = indexed.promise(PROMPT)
    assert first is not None
    assert indexed.promise([1, 2]) is None and index.held == set(PROMPT)
    first.withdraw()
    assert indexed.promise([1, 2]) is not None
