"""The host tier: which pages are saved, loaded and dropped."""

from array import array

import pytest
from tests.worker.cache.test_cache import ROOT, attach, compute, tokens

from fairlead_index.hashing import block_hashes, extend
from fairlead_worker.cache.pages import OutOfPages, PagePool
from fairlead_worker.cache.prefix import Lease, PrefixCache


def cache_of(pages: int, slots: int, page_size: int = 4, block_tokens: int = 4) -> PrefixCache:
    return PrefixCache(PagePool(pages, page_size), block_tokens, extend, slots)


def fill(cache: PrefixCache, pages: int, first: int = 1000) -> Lease:
    """A lease on `pages` pages of tokens that no request uses."""
    lease = attach(cache, tokens(1, first=first))
    cache.grow(lease, pages * cache.page_size)
    return lease


def copies(cache: PrefixCache) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    assert cache.host is not None
    return cache.host.take_copies()


def test_an_evicted_page_is_saved_matched_and_loaded() -> None:
    cache = cache_of(pages=4, slots=8)
    prompt = tokens(13)
    before = compute(cache, prompt)
    pages = before.pages[:3].tolist()
    before.release()
    fill(cache, 4).release()
    saves, loads = copies(cache)
    assert ([page for page, _ in saves], loads) == (pages[::-1], []), "leaves first, and before a request writes into these pages"
    slots = [slot for _, slot in saves][::-1]

    match = cache.track(ROOT, prompt)
    node = cache.match(match)
    assert node.depth == 3 and cache.unused_above(node) == 3, "a hit, which takes three pages of the device"
    lease = cache.attach(node)
    saves, loads = copies(cache)
    assert (saves, loads) == ([], [(page, slot) for page, slot in zip(lease.pages, slots, strict=True)])
    assert (lease.shared, lease.loaded, cache.available) == (3, 3, 1)


def test_only_the_evicted_part_of_a_prefix_is_loaded() -> None:
    cache = cache_of(pages=6, slots=8)
    compute(cache, tokens(13)).release()
    filler = fill(cache, 5)
    assert len(copies(cache)[0]) == 2
    filler.release()
    lease = attach(cache, tokens(13))
    assert (lease.shared, lease.loaded) == (3, 2)
    again = attach(cache, tokens(13))
    assert (again.loaded, again.pages) == (0, lease.pages), "once for all requests of one step"
    assert len(copies(cache)[1]) == 2


def test_a_loaded_page_is_saved_once() -> None:
    cache = cache_of(pages=3, slots=8)
    compute(cache, tokens(9)).release()
    for turn in range(4):
        fill(cache, 3, first=1000).release()
        saves, loads = copies(cache)
        assert (len(saves), len(loads)) == (2 if turn == 0 else 0, 0), "its slot was kept, and pages do not change"
        attach(cache, tokens(9)).release()
        assert len(copies(cache)[1]) == 2


def test_blocks_stay_announced_until_no_tier_holds_them() -> None:
    cache = cache_of(pages=3, slots=2)
    prompt = tokens(12)
    hashes = block_hashes(ROOT, prompt, 4)
    compute(cache, prompt).release()
    assert cache.drain_events()[0].hashes == hashes.tobytes()
    filler = fill(cache, 2)
    assert not cache.drain_events() and cache.block_hashes() == hashes, "two are in the host tier, and hits"
    cache.grow(filler, 12)
    (removed,) = cache.drain_events()
    assert removed.kind == "removed" and array("Q", removed.hashes) == hashes[2:], "the third page took the slot of the deepest"
    assert cache.block_hashes() == hashes[:2]
    assert cache.host is not None and cache.host.dropped_pages == 1


def test_the_least_recently_used_pages_are_dropped_first_leaves_before_parents() -> None:
    cache = cache_of(pages=4, slots=4)
    old, new = tokens(9), tokens(9, first=100)
    for prompt in (old, new):
        compute(cache, prompt).release()
    fill(cache, 4).release()
    compute(cache, tokens(13, first=200)).release()
    fill(cache, 2).release()
    assert attach(cache, old).shared == 1, "one of two pages given up"
    assert attach(cache, new).shared == 2


def test_a_slot_to_be_loaded_from_is_not_saved_into() -> None:
    cache = cache_of(pages=3, slots=2)
    compute(cache, tokens(8)).release()
    fill(cache, 3).release()
    copies(cache)
    compute(cache, tokens(12, first=200)).release()
    lease = attach(cache, tokens(9))
    filler = fill(cache, 1)
    saves, loads = copies(cache)
    assert (lease.loaded, len(loads), saves) == (2, 2, []), "nowhere to put what made room: it is given up"
    filler.release()
    compute(cache, tokens(4, first=300)).release()
    fill(cache, 1)
    assert len(copies(cache)[0]) == 1, "from the next plan on, slots of pages that are on the device are to be had"


def test_loading_needs_free_pages_and_takes_none_otherwise() -> None:
    cache = cache_of(pages=4, slots=8)
    compute(cache, tokens(13)).release()
    hog = fill(cache, 4)
    copies(cache)
    hog.release()
    hog = fill(cache, 2)
    match = cache.track(ROOT, tokens(13))
    with pytest.raises(OutOfPages, match="3 pages to load"):
        cache.attach(cache.match(match))
    assert (cache.available, copies(cache)) == (2, ([], []))
    hog.release()
    assert cache.attach(cache.match(match)).loaded == 3


def test_a_recomputed_page_is_on_the_device_again() -> None:
    cache = cache_of(pages=4, slots=8)
    compute(cache, tokens(8)).release()
    fill(cache, 4).release()
    copies(cache)
    lease = attach(cache, tokens(8))  # one token must be left to compute, so the second page is computed again
    assert lease.loaded == 1
    cache.grow(lease, 8)
    cache.publish(lease, tokens(8), 8)
    assert len(copies(cache)[1]) == 1 and lease.shared == 2
    lease.release()
    assert (cache.pool.cached, cache.evictable) == (2, 2)
    fill(cache, 4).release()
    assert copies(cache) == ([], []), "both have slots"


def test_matches_follow_pages_that_the_host_drops() -> None:
    cache = cache_of(pages=2, slots=2)
    compute(cache, tokens(9)[:8]).release()
    match = cache.track(ROOT, tokens(9))
    fill(cache, 2).release()
    assert not list(cache.refresh(10)) and cache.match(match).depth == 2, "moved, not gone"
    compute(cache, tokens(8, first=200)).release()
    fill(cache, 2).release()
    assert [w.depth for w in cache.refresh(10)] == [0]


def test_an_empty_tree_is_forgotten_and_memory_stays_flat() -> None:
    cache = cache_of(pages=4, slots=6)
    for turn in range(500):
        compute(cache, tokens(12), root=turn).release()
        copies(cache)
    assert len(cache._roots) == 4, "10 pages in trees of three"
    assert sum(1 for _ in cache.nodes()) == 10
    assert len(cache._leaves._heap) <= 4
    for root in list(cache._roots):
        assert cache._roots[root].children


@pytest.mark.parametrize("slots", [0, 2, 8])
def test_a_reset_drops_both_tiers_except_what_is_in_use(slots: int) -> None:
    cache = cache_of(pages=6, slots=slots)
    compute(cache, tokens(13)).release()
    fill(cache, 5).release()
    used = attach(cache, tokens(13))
    cache.drain_events()
    kept = used.shared
    cache.clear()
    assert sum(1 for _ in cache.nodes()) == kept and cache.evictable == 0
    assert cache.host is None or cache.host.report(0, 1).used == len(copies(cache)[1]), "slots that the next plan loads"
    used.release()
    if slots:
        cache.clear()
        copies(cache)
    cache.clear()
    assert not list(cache.nodes()) and not cache.block_hashes() and cache.pool.free == cache.pool.total
    assert cache.host is None or cache.host.report(0, 1).used == 0
