"""Pages, leases and the radix prefix cache, without a scheduler."""

from array import array

import pytest

from fairlead_index.hashing import block_hashes, extend
from fairlead_worker.cache.pages import OutOfPages, PagePool
from fairlead_worker.cache.prefix import Lease, PrefixCache

ROOT = 99


def cache_of(pages: int = 16, page_size: int = 4, block_tokens: int = 8) -> PrefixCache:
    return PrefixCache(PagePool(pages, page_size), block_tokens, extend)


def tokens(count: int, first: int = 0) -> "array[int]":
    return array("I", range(first, first + count))


def cached_pages(cache: PrefixCache, prompt: "array[int]") -> int:
    match = cache.track(ROOT, prompt)
    cache.untrack(match)
    return match.depth


def attach(cache: PrefixCache, prompt: "array[int]", root: int = ROOT) -> Lease:
    match = cache.track(root, prompt)
    lease = cache.attach(cache.match(match))
    cache.untrack(match)
    return lease


def compute(cache: PrefixCache, prompt: "array[int]", root: int = ROOT) -> Lease:
    """A lease on all of `prompt`, computed and published."""
    lease = attach(cache, prompt, root)
    cache.grow(lease, len(prompt))
    cache.publish(lease, prompt, len(prompt))
    return lease


def counters(cache: PrefixCache) -> tuple[int, int, int]:
    return cache.pool.free, cache.pool.leased, cache.pool.cached


def test_page_size_has_bounds() -> None:
    for size in (0, 65):
        with pytest.raises(ValueError, match=f"not {size}"):
            PagePool(4, size)
    with pytest.raises(ValueError, match="multiple of the page size 4, not 6"):
        cache_of(block_tokens=6)


def test_release_gives_back_once() -> None:
    cache = cache_of()
    lease = compute(cache, tokens(10))
    assert counters(cache) == (13, 1, 2) and cache.evictable == 0
    lease.release()
    assert counters(cache) == (14, 0, 2) and cache.evictable == 2
    lease.release()
    assert counters(cache) == (14, 0, 2), "there is nothing to release twice"
    with pytest.raises(RuntimeError, match="released"):
        cache.publish(lease, tokens(10), 10)


def test_full_hit_leaves_a_token_to_compute() -> None:
    cache = cache_of()
    compute(cache, tokens(8)).release()
    assert attach(cache, tokens(8)).shared == 1
    assert attach(cache, tokens(9)).shared == 2


def test_roots_share_nothing() -> None:
    cache = cache_of()
    compute(cache, tokens(9), root=1).release()
    assert attach(cache, tokens(9), root=2).shared == 0
    assert attach(cache, tokens(9), root=1).shared == 2


def test_requests_with_an_adapter_share_nothing_with_others_under_the_same_root() -> None:
    cache = cache_of()
    compute(cache, tokens(9), root=1).release()
    match = cache.track(1, tokens(9), adapted=True)
    assert cache.match(match).depth == 0
    lease = cache.attach(cache.match(match))
    cache.untrack(match)
    cache.grow(lease, 9)
    cache.publish(lease, tokens(9), 9)
    assert counters(cache) == (11, 1, 4) and len(list(cache.nodes())) == 4
    lease.release()
    cache.grow(attach(cache, tokens(1), root=2), 64)
    assert cache.pool.cached == 0 and not cache._roots.keys() - {2} and not cache._adapter_roots


def test_a_match_of_a_removed_request_is_dropped() -> None:
    """First come, first served asks for no refresh: what changed for a waiting request must not outlive it."""
    cache = cache_of()
    for turn in range(100):
        match = cache.track(ROOT, tokens(9, first=10 * turn))
        compute(cache, tokens(9, first=10 * turn)).release()
        cache.untrack(match)
    assert not cache._matches._stale


def test_an_empty_tree_is_dropped() -> None:
    cache = cache_of(pages=2)
    for root in range(100):
        compute(cache, tokens(8), root=root).release()
    assert len(cache._roots) == 1, "one tree holds the pages; those of 99 salts are gone"


def test_eviction_is_leaf_first_and_least_recently_used() -> None:
    cache = cache_of(pages=6)
    old, new = tokens(12), tokens(12, first=100)
    compute(cache, old).release()
    compute(cache, new).release()
    attach(cache, old).release()  # touches two of the three old pages: one token must be left
    held = attach(cache, array("I"))
    cache.grow(held, 4)
    assert {node.key for node in cache.nodes()} >= {old[:4].tobytes(), old[4:8].tobytes(), new[:4].tobytes(), new[4:8].tobytes()}
    cache.grow(held, 4 * 4)
    assert {node.key for node in cache.nodes()} == {old[:4].tobytes(), old[4:8].tobytes()}, "the longest unused prefix goes, from its end"
    assert cache.evicted_pages == 4


def test_a_branch_goes_from_its_end_as_far_as_nothing_was_used_less_recently() -> None:
    cache = cache_of(pages=6)
    compute(cache, tokens(16)).release()
    compute(cache, tokens(8, first=50)).release()
    attach(cache, tokens(9)).release()  # half of the first branch again
    left = []
    for pages in (1, 3, 5):
        hog = attach(cache, tokens(1, first=70))
        cache.grow(hog, 4 * pages)
        hog.release()
        left.append((cached_pages(cache, tokens(17)), cached_pages(cache, tokens(9, first=50))))
    assert left == [(3, 2), (2, 1), (1, 0)]
    assert cache.evicted_pages == 5 and cache.pool.free == 5


def test_pages_in_use_are_never_evicted() -> None:
    cache = cache_of(pages=4)
    compute(cache, tokens(12)).release()
    user = attach(cache, tokens(9))
    assert (cache.evictable, cache.available) == (1, 2)
    greedy = attach(cache, tokens(1, first=50))
    with pytest.raises(OutOfPages):
        cache.grow(greedy, 12)
    assert counters(cache) == (1, 0, 3), "and nothing was taken"
    cache.grow(greedy, 8)
    assert [node.page for node in cache.nodes()] == list(user.pages)


def test_duplicate_pages_are_freed_on_publish() -> None:
    cache = cache_of()
    first, second = attach(cache, tokens(10)), attach(cache, tokens(10))
    for lease in (first, second):
        cache.grow(lease, 10)
    cache.publish(first, tokens(10), 10)
    assert counters(cache) == (10, 4, 2)
    cache.publish(second, tokens(10), 10)
    assert counters(cache) == (12, 2, 2) and first.pages[:2] == second.pages[:2] and first.pages[2] != second.pages[2]
    first.release()
    assert cache.evictable == 0, "the second one still reads them"
    second.release()
    assert counters(cache) == (14, 0, 2) and cache.evictable == 2


def test_exclusive_pages_are_those_of_one_lease_alone() -> None:
    cache = cache_of()
    one = compute(cache, tokens(14))
    assert cache.exclusive_pages(one) == 4
    two = attach(cache, tokens(9))
    assert cache.exclusive_pages(one) == 2 and cache.exclusive_pages(two) == 0
    one.release()
    assert cache.exclusive_pages(two) == 2


def test_events_name_whole_blocks_parents_first_children_out_first() -> None:
    cache = cache_of(pages=6, block_tokens=8)
    prompt = tokens(22)
    hashes = block_hashes(ROOT, prompt, 8)
    lease = attach(cache, prompt)
    cache.grow(lease, 22)
    cache.publish(lease, prompt, 12)  # an unfinished request is cached at each chunk
    (stored,) = cache.drain_events()
    assert (stored.kind, stored.hashes) == ("stored", hashes[:1].tobytes())
    cache.publish(lease, prompt, 22)
    assert cache.drain_events()[0].hashes == hashes[1:].tobytes() and cache.block_hashes() == hashes
    lease.release()
    other = attach(cache, tokens(1, first=70))
    cache.grow(other, 20)
    (removed,) = cache.drain_events()
    assert (removed.kind, array("Q", removed.hashes)) == ("removed", hashes[::-1])
    assert not cache.block_hashes() and not cache.drain_events()


def test_matches_follow_publishing_and_eviction() -> None:
    cache = cache_of(pages=4)
    prompt = tokens(12)
    match = cache.track(ROOT, prompt)
    assert match.depth == 0
    compute(cache, prompt[:8]).release()
    assert [w.depth for w in cache.refresh(10)] == [2] and not list(cache.refresh(10))
    hog = attach(cache, tokens(1, first=70))
    cache.grow(hog, 16)
    assert cache.match(match).depth == 0
    hog.release()
    compute(cache, prompt[:8], root=5).release()
    assert [w.depth for w in cache.refresh(10)] == [0], "touched by the eviction; another root's pages do not count"
    cache.untrack(match)
    cache.untrack(match)
    assert ROOT not in cache._roots
