"""Blocks of waiting requests in the index."""

from array import array

from tests.worker.cache.test_cache import ROOT, attach, cache_of, cached_pages, compute, tokens

from fairlead_index.hashing import block_hashes
from fairlead_worker.cache.prefix import PrefixCache


def apply(cache: PrefixCache, shown: list[int]) -> list[int]:
    """Apply the cache's events to the list of shown blocks."""
    for event in cache.drain_events():
        for block in array("Q", event.hashes):
            assert (block in shown) == (event.kind == "removed"), "a block is stored once and removed once"
            (shown.append if event.kind == "stored" else shown.remove)(block)
    return shown


def test_promised_blocks_are_shown_once_from_the_promise_to_the_eviction() -> None:
    cache, prompt, shown = cache_of(pages=8), tokens(17), list[int]()
    blocks = list(block_hashes(ROOT, prompt, 8))
    match = cache.track(ROOT, prompt)
    promised = cache.promise(match)
    assert list(promised) == blocks == apply(cache, shown) == list(cache.block_hashes())
    cache.untrack(match)
    lease = compute(cache, prompt)
    assert apply(cache, shown) == blocks, "computing them changes nothing"
    cache.withdraw(promised, None)
    lease.release()
    assert apply(cache, shown) == blocks, "they are cached"
    cache.grow(attach(cache, tokens(1, first=90)), 32)
    assert apply(cache, shown) == [] == list(cache.block_hashes())


def test_an_evicted_block_stays_shown_while_a_request_waits_that_computes_it_again() -> None:
    cache, prompt, shown = cache_of(pages=8), tokens(17), list[int]()
    compute(cache, prompt).release()
    match = cache.track(ROOT, prompt)
    promised = cache.promise(match)
    all_pages = attach(cache, tokens(1, first=90))
    cache.grow(all_pages, 32)
    assert cached_pages(cache, prompt) == 0 and len(apply(cache, shown)) == 2
    all_pages.release()
    cache.withdraw(promised, match)
    cache.untrack(match)
    assert apply(cache, shown) == [], "the request ended before it computed anything"


def test_a_block_of_two_requests_is_shown_until_the_last_of_them_ends() -> None:
    cache, shown = cache_of(), list[int]()
    short, long = cache.track(ROOT, tokens(9)), cache.track(ROOT, tokens(17))
    first, second = cache.promise(short), cache.promise(long)
    assert len(apply(cache, shown)) == 2
    cache.withdraw(second, long)
    assert apply(cache, shown) == list(first)
    cache.withdraw(first, short)
    assert apply(cache, shown) == []
