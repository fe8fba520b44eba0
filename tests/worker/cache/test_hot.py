"""Which prefixes count as hot: those that requests came back to, shared pages once, the budget kept."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_index.hashing import extend
from fairlead_worker.cache.hot import MAX_LENGTH_FACTOR, find_hot_prefixes
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache

PAGE = 4


def run(cache: PrefixCache, root: int, tokens: "array[int]", adapted: bool = False) -> None:
    """One request: attach to what is cached, compute the rest, leave it to the cache."""
    match = cache.track(root, tokens, adapted=adapted)
    lease = cache.attach(cache.match(match))
    cache.untrack(match)
    cache.grow(lease, len(tokens))
    cache.publish(lease, tokens, len(tokens))
    lease.release()


def test_the_shared_prefix_of_each_root_comes_first_and_single_prompts_never() -> None:
    cache = PrefixCache(PagePool(200, PAGE), 2 * PAGE, extend)
    system = array("I", range(16))
    for client in range(5):
        run(cache, 7, system + array("I", [100 + client] * 8))
    for _ in range(3):
        run(cache, 9, array("I", [50] * 9))
    run(cache, 11, array("I", range(60, 80)))
    found = find_hot_prefixes(cache, 1000)
    assert [(each.root, array("I", each.tokens).tolist()) for each in found] == [(7, list(range(16))), (9, [50] * 8)]
    assert [len(each.tokens) // 4 for each in find_hot_prefixes(cache, 8)] == [8], "two pages of the hottest"
    assert find_hot_prefixes(cache, PAGE - 1) == ()


def test_prefixes_of_adapters_count_like_those_of_the_base_model() -> None:
    cache = PrefixCache(PagePool(200, PAGE), 2 * PAGE, extend)
    for _ in range(2):
        run(cache, 7, array("I", range(9)))
    for _ in range(3):
        run(cache, 8, array("I", range(9)), adapted=True)
    assert [each.root for each in find_hot_prefixes(cache, 1000)] == [8, 7]


def test_many_questions_about_one_document_do_not_send_it_many_times() -> None:
    cache = PrefixCache(PagePool(800, PAGE), PAGE, extend)
    document = array("I", range(100 * PAGE))
    for question in range(300):
        for _ in range(2):
            run(cache, 7, document + array("I", [1000 + question] * (PAGE + 1)))
    found = find_hot_prefixes(cache, 400 * PAGE)
    assert len({each.tokens[-4:] for each in found}) == len(found) == MAX_LENGTH_FACTOR * 400 // 101


@given(
    prompts=st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 2), min_size=1, max_size=40)), min_size=1, max_size=40),
    budget=st.integers(0, 80),
)
@settings(deadline=None, max_examples=60)
def test_hot_prefixes_are_cached_fit_the_budget_and_are_the_hottest(prompts: list[tuple[int, list[int]]], budget: int) -> None:
    cache = PrefixCache(PagePool(800, PAGE), PAGE, extend)
    for root, tokens in prompts:
        run(cache, root, array("I", tokens))
    pages = {}
    for prefix in find_hot_prefixes(cache, budget):
        tokens = array("I", prefix.tokens)
        assert len(tokens) % PAGE == 0
        for end in range(PAGE, len(tokens) + 1, PAGE):
            pages[prefix.root, tokens[:end].tobytes()] = None
    assert len(pages) * PAGE <= budget
    hits = {}
    for node in cache.nodes():
        keys, step = [], node
        while step.parent is not None:
            keys.append(step.key)
            step = step.parent
        hits[step.chain, b"".join(reversed(keys))] = node.hits
    told = sorted((hits[page] for page in pages), reverse=True)
    best = sorted((count for count in hits.values() if count), reverse=True)[: budget // PAGE]
    assert told == best, "no page that is left out has more hits than one that is told"
