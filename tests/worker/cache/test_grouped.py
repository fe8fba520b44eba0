"""The prefix cache of models with windows, without a scheduler: what is freed, what is a hit, and what the index sees."""

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.cache.test_cache import ROOT, cached_pages, tokens
from tests.worker.cache.test_promises import apply

from fairlead_index.hashing import block_hashes, extend
from fairlead_worker.cache.grouped import GroupedPrefixCache
from fairlead_worker.cache.grouped_lease import GroupedLease
from fairlead_worker.cache.groups import CacheGroups
from fairlead_worker.cache.make import make_cache
from fairlead_worker.cache.pages import OutOfPages, PagePool

PAGE = 4
MIXED, WINDOWED = CacheGroups(1, 2, 8), CacheGroups(0, 1, 8)
"""Two pages of window."""


def cache_of(groups: CacheGroups, pages: int = 90, block_tokens: int = 8, chunk: int = 8) -> GroupedPrefixCache:
    cache = make_cache(PagePool(pages, PAGE), block_tokens, extend, groups=groups, chunk_tokens=chunk)
    assert isinstance(cache, GroupedPrefixCache)
    return cache


def compute(cache: GroupedPrefixCache, prompt: "array[int]", chunk: int = 8, store: Callable[..., None] = lambda *_: None) -> GroupedLease:
    """Return a lease on all of `prompt`, computed in chunks and published."""
    match = cache.track(ROOT, prompt)
    node = cache.match(match)
    lease = cache.attach(node)
    cache.untrack(match)
    assert isinstance(lease, GroupedLease)
    cache.reserve(lease, len(prompt))
    computed = node.depth * PAGE
    while computed < len(prompt):
        count = cache.grow_chunk(lease, computed, min(chunk, len(prompt) - computed))
        assert count
        store(lease, prompt, computed, count)
        computed += count
        cache.publish(lease, prompt, computed)
    return lease


def units(cache: GroupedPrefixCache) -> int:
    """Pages that cannot be had."""
    return cache.pool.total - cache.pool.free - cache.evictable


@pytest.mark.parametrize("groups", [MIXED, WINDOWED], ids=["mixed", "windowed"])
def test_pages_behind_the_window_can_be_had_while_a_request_runs(groups: CacheGroups) -> None:
    cache = cache_of(groups, pages=400)
    lease = compute(cache, tokens(200))
    assert units(cache) == 50 * groups.full + 2 * groups.windowed
    for _ in range(10):
        cache.grow_each([lease])
        assert units(cache) == len(lease.pages) * groups.full + 3 * groups.windowed, "the window, and the page that is filled"
    lease.release()
    assert units(cache) == 0


def test_a_prompt_of_any_length_fits_if_all_layers_have_a_window() -> None:
    cache = cache_of(WINDOWED, pages=6)
    for _ in range(2):
        compute(cache, tokens(2000)).release()
    assert cache.evicted_pages > 490 and cached_pages(cache, tokens(2000)) == 499
    with pytest.raises(OutOfPages):
        cache.grow(compute(cache, tokens(8)), 28)


def test_a_request_continues_where_the_last_window_is() -> None:
    """Of an unused prefix, the pages just before its last window go first, then those before them; its last window goes last."""
    prompt = tokens(41)  # 10 pages of each group

    def hits(evictions: int) -> list[int]:
        """Return the cached pages of the first 1 to 10 pages. A new cache each time, because a waiting request counts as a use."""
        cache = cache_of(MIXED)
        compute(cache, prompt).release()
        for _ in range(evictions):
            cache._evict(1)
        return [cached_pages(cache, prompt[: 4 * depth + 1]) for depth in range(1, 11)]

    assert hits(0) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert hits(1) == [1, 2, 3, 4, 5, 6, 7, 7, 7, 10], "page 8 went: nothing continues after it before page 10"
    assert hits(2) == [1, 2, 3, 4, 5, 6, 6, 6, 6, 10]
    assert hits(8) == [0, 0, 0, 0, 0, 0, 0, 0, 0, 10], "only the last window is left"
    assert hits(9) == [0] * 10


def test_ends_of_prefixes_outlast_other_pages_until_they_are_three_quarters() -> None:
    cache = cache_of(WINDOWED, pages=30)
    prompts = [tokens(41, first=100 * number) for number in range(12)]
    for prompt in prompts[:3]:
        compute(cache, prompt).release()
    assert [cached_pages(cache, prompt) for prompt in prompts[:3]] == [10, 10, 10], "30 pages, as many as the three have"
    for prompt in prompts[3:]:
        compute(cache, prompt).release()
    ends = sum(cached_pages(cache, prompt) == 10 for prompt in prompts)
    assert 9 <= ends <= 11, "two pages of each"
    assert cached_pages(cache, prompts[-1][:33]) == 8, "and the latest prompt can be shared"


def test_a_prompt_that_waits_counts_as_used() -> None:
    cache = cache_of(MIXED)
    first, second = tokens(17), tokens(17, first=100)
    compute(cache, first).release()
    compute(cache, second).release()
    match = cache.track(ROOT, first)
    for _ in range(6):
        cache._evict(1)
    cache.untrack(match)
    assert (cached_pages(cache, second), cached_pages(cache, first)) == (0, 4)


def test_the_index_sees_blocks_down_to_the_first_hole() -> None:
    cache, prompt, shown = cache_of(MIXED), tokens(41), list[int]()
    blocks = list(block_hashes(ROOT, prompt, 8))
    compute(cache, prompt).release()
    assert apply(cache, shown) == blocks == list(cache.block_hashes())
    cache._evict(1)
    assert apply(cache, shown) == blocks[:3] == list(cache.block_hashes()), "pages 8 and 9 are no longer resumable, so block 5 is hidden"
    match = cache.track(ROOT, prompt)
    node = cache.match(match)
    assert (node.depth, cache.shown_tokens(node)) == (10, 24)
    cache.untrack(match)
    compute(cache, prompt[:33]).release()
    assert apply(cache, shown) == blocks == list(cache.block_hashes()), "the hole is filled"


def test_a_promise_ends_when_a_computed_block_is_evicted() -> None:
    cache, prompt, shown = cache_of(MIXED), tokens(41), list[int]()
    match = cache.track(ROOT, prompt)
    promised = cache.promise(match)
    cache.untrack(match)
    lease = compute(cache, prompt)
    assert cache.is_shown(lease) and len(apply(cache, shown)) == 5
    cache._evict(4)
    assert not cache.is_shown(lease)
    match = cache.track(ROOT, prompt)
    cache.withdraw(promised, match)
    cache.untrack(match)
    assert apply(cache, shown) == list(cache.block_hashes()) == []
    lease.release()


def test_a_duplicate_fills_the_hole_of_the_cached_prefix() -> None:
    cache, prompt = cache_of(MIXED), tokens(33)
    first = compute(cache, prompt)
    first.release()
    while cached_pages(cache, prompt[:17]):
        cache._evict(1)
    second = compute(cache, prompt[:17])  # from the beginning: its full pages are duplicates
    assert second.pages[:4] == compute(cache, prompt).pages[:4] and cached_pages(cache, prompt[:17]) == 4


def test_a_short_pool_lets_a_chunk_be_shorter() -> None:
    cache = cache_of(WINDOWED, pages=6, chunk=100)
    lease = compute(cache, tokens(4))
    assert cache.grow_chunk(lease, 4, 100) == 20 and cache.grow_chunk(lease, 4, 100) == 20


def test_a_window_comes_back_from_the_host_with_the_pages_before_it() -> None:
    cache = make_cache(PagePool(40, PAGE), 8, extend, groups=MIXED, chunk_tokens=8, host_slots=60)
    prompt = tokens(41)  # 10 pages of each group
    compute(cache, prompt).release()
    cache._evict(30)
    assert cache.host is not None and len(cache.host.take_copies()[0]) == 30 and cache.pool.free == 40
    match = cache.track(ROOT, prompt)
    node = cache.match(match)
    assert (node.depth, cache.shortage(41, 0, node)) == (10, -7), "17 of 40: ten of one group, two of the others, and the next of each"
    lease = cache.attach(node)
    assert isinstance(lease, GroupedLease) and (lease.loaded, lease.first) == (10, 8)
    saves, loads = cache.host.take_copies()
    assert not saves and sorted(page for page, _ in loads) == sorted([*lease.pages, *lease.windows[0][8:], *lease.windows[1][8:]])
    lease.release()
    cache._evict(14)
    assert not cache.host.take_copies()[0], "their slots were kept"
    assert cache.clear() == 10 and cache.host.report(0, 1).used == 0 and not list(cache.nodes())


@settings(deadline=None, max_examples=150)
@given(
    groups=st.builds(CacheGroups, full=st.integers(0, 1), windowed=st.integers(1, 3), window=st.integers(1, 14), chunked=st.booleans()),
    room=st.sampled_from([14, 20, 1000]),
    block_pages=st.integers(1, 3),
    chunk=st.sampled_from([1, 4, 9, 50]),
    prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50), st.integers(0, 6), st.booleans()), min_size=1, max_size=25),
)
def test_hits_and_events_are_those_of_a_simple_model(groups, room, block_pages, chunk, prompts) -> None:
    """The model knows each computed prefix, and what is in each page. A hit is no longer than a computed prefix, and as long with room."""
    cache = cache_of(groups, pages=room * groups.count, block_tokens=PAGE * block_pages, chunk=min(chunk, 12))
    memory: dict[tuple[int, int], tuple[int, ...]] = {}  # (page, slot) -> group and tokens down to the slot
    computed, shown, running = set[tuple[int, ...]](), list[int](), list[GroupedLease]()

    def store(lease: GroupedLease, prompt: "array[int]", start: int, count: int) -> None:
        tables = lease.tables
        for place in range(start, start + count):
            for group, table in enumerate(tables):
                memory[table[place // PAGE], place % PAGE] = (group, *prompt[: place + 1])
        for place in range(start, start + count):
            for group, table in enumerate(tables):
                first = groups.first_token(place) if group >= groups.full else 0
                for seen in range(first, place + 1):
                    assert memory[table[seen // PAGE], seen % PAGE] == (group, *prompt[: seen + 1])

    for stem, length, ending, stays in prompts:
        prompt = array("I", [*(stem // 2 + 7 * place + (stem if place > 20 else 0) for place in range(length)), *[500 + ending] * ending])
        if cache.shortage(len(prompt), 0, cache.match(match := cache.track(ROOT, prompt))) > 0:
            cache.untrack(match)
            while running:
                running.pop().release()
            continue
        hit = cache.match(match).depth
        cache.untrack(match)
        known = max((common(prompt, other) for other in computed), default=0)
        most = min(known, len(prompt) - 1) // PAGE
        assert hit <= most and (hit == most or cache.evicted_pages)
        lease = compute(cache, prompt, chunk, store)
        computed.add(tuple(prompt))
        running.append(lease)
        if not stays:
            running.pop(len(prompt) % len(running)).release()
        apply(cache, shown)
        assert sorted(shown) == sorted(cache.block_hashes())
        for other in computed:  # what the index says of a prompt can be reused
            matched = cached_pages(cache, array("I", [*other, 9999])) * PAGE
            hashes = list(block_hashes(ROOT, array("I", other), PAGE * block_pages))
            predicted = next((place for place, block in enumerate(hashes) if block not in shown), len(hashes))
            assert predicted * PAGE * block_pages <= matched
    for lease in running:
        lease.release()
    assert units(cache) == 0
    cache.clear()
    assert cache.pool.free == cache.pool.total and not cache.block_hashes()


def common(left: "array[int]", right: tuple[int, ...]) -> int:
    return next((place for place, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), min(len(left), len(right)))
