"""Blocks of waiting requests in the index, and their prefixes in the eviction order."""

from array import array

from tests.worker.cache.test_cache import ROOT, attach, cache_of, cached_pages, compute, tokens
from tests.worker.scheduler.test_cost import calls_of

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


def test_a_prefix_that_a_waiting_request_will_use_is_evicted_last() -> None:
    cache = cache_of(pages=6)
    compute(cache, tokens(8)).release()
    compute(cache, tokens(8, first=50)).release()
    match = cache.track(ROOT, tokens(9))
    taken = attach(cache, tokens(1, first=90))
    cache.grow(taken, 16)
    assert (cache.match(match).depth, cached_pages(cache, tokens(9, first=50))) == (2, 0), (
        "the other prefix was used later, but no request waits for it"
    )
    cache.grow(taken, 24)
    assert cached_pages(cache, tokens(9)) == 0, "it does not keep a running request from its pages"


def test_an_eviction_does_not_pass_all_prefixes_that_requests_wait_for() -> None:
    def cost(waiting: int) -> int:
        """Return the calls of an eviction, of built-in functions too, where waiting requests will use all cached prefixes."""
        cache = cache_of(pages=2 * waiting)
        for number in range(waiting):
            compute(cache, tokens(8, first=10 * number)).release()
        matches = [cache.track(ROOT, tokens(9, first=10 * number)) for number in range(waiting)]
        running = attach(cache, tokens(1, first=90_000))
        cache.grow(running, 8)  # a whole prefix
        calls = calls_of(lambda: cache.grow(running, 12), builtins=True)
        assert cache.evicted_pages == 3 and sum(cache.match(match).depth for match in matches) == 2 * waiting - 3
        return calls

    assert cost(200) == cost(20)


def test_a_prefix_that_no_request_waits_for_any_more_is_evicted_before_those_that_some_wait_for() -> None:
    cache = cache_of(pages=6)
    compute(cache, tokens(8)).release()
    compute(cache, tokens(8, first=50)).release()
    first, second = cache.track(ROOT, tokens(9)), cache.track(ROOT, tokens(9, first=50))
    taken = attach(cache, tokens(1, first=90))
    cache.grow(taken, 12)  # both leaves come up, and one page goes
    assert (cache.match(first).depth, cache.match(second).depth) == (1, 2)
    cache.untrack(second)
    cache.grow(taken, 20)
    assert cached_pages(cache, tokens(9, first=50)) == 0 and cache.match(first).depth == 1
