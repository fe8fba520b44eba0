"""The tree of prefixes: every request is counted once, a prefix has exactly the requests that begin with it, and a page is bounded."""

from array import array
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from fairlead_index.hashing import block_hashes
from fairlead_router.console.prefix_tree import PrefixNode, build_tree, choose_nodes, find_holders

BLOCK_TOKENS = 16


def chain(*blocks: int) -> "array[int]":
    """Return the hashes of a prompt whose blocks have these contents."""
    return block_hashes(0, [block for block in blocks for _ in range(BLOCK_TOKENS)], BLOCK_TOKENS)


PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=7).map(lambda blocks: chain(*blocks)), max_size=40)


def nodes_of(root: PrefixNode) -> Iterator[PrefixNode]:
    waiting = list(root.children)
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children


@given(PROMPTS)
def test_a_node_has_the_requests_that_begin_with_its_prefix(prompts: "list[array[int]]") -> None:
    root = build_tree(prompts)
    assert root.requests == sum(map(bool, prompts)) == sum(child.requests for child in root.children)
    for node in nodes_of(root):
        assert node.requests == sum(prompt[: node.end] == node.prefix for prompt in prompts)
        assert len({child.chain[node.end] for child in node.children}) == len(node.children)
        assert all(child.start == node.end < child.end for child in node.children)


@given(PROMPTS)
def test_every_request_ends_at_one_node_and_a_node_without_a_fork_is_collapsed(prompts: "list[array[int]]") -> None:
    ended = 0
    for node in nodes_of(build_tree(prompts)):
        ends_here = node.requests - sum(child.requests for child in node.children)
        assert ends_here >= 0 and (ends_here or len(node.children) > 1), "a node ends where requests part, or where one ends"
        ended += ends_here
    assert ended == sum(map(bool, prompts))


@given(PROMPTS, st.integers(0, 12))
def test_a_page_is_bounded_and_well_nested_with_parents_before_children(prompts: "list[array[int]]", limit: int) -> None:
    root = build_tree(prompts)
    everything = list(nodes_of(root))
    rows = choose_nodes(root, limit)
    assert len(rows) == min(limit, len(everything)) == len({row.node for row in rows})
    path: list[PrefixNode] = []
    for row in rows:
        above = path[-1] if path else root
        assert row.level == len(path) and row.node in above.children
        path.append(row.node)
        shown = sum(any(other.node == child for other in rows) for child in row.node.children)
        assert row.hidden == len(row.node.children) - shown and row.is_leaf == (shown == 0)
        del path[len(path) - row.closes :]
    assert not path, "every opened element is closed"
    if rows:
        assert rows[0].node.heat == max(child.heat for child in root.children)


@given(PROMPTS, st.lists(st.lists(st.integers(0, 2), max_size=7).map(lambda blocks: chain(*blocks)), max_size=4))
def test_holders_of_inner_nodes_follow_from_those_of_the_leaves(prompts: "list[array[int]]", caches: "list[array[int]]") -> None:
    rows = choose_nodes(build_tree(prompts), 100)

    def tokens_held(cache: "array[int]", prefix: "array[int]") -> int:
        return BLOCK_TOKENS * len(set(cache) & set(prefix))

    held = {
        place: {str(pod): tokens for pod, cache in enumerate(caches) if (tokens := tokens_held(cache, row.node.prefix))}
        for place, row in enumerate(rows)
        if row.is_leaf
    }
    for row, holders in zip(rows, find_holders(rows, held, BLOCK_TOKENS), strict=True):
        assert holders == {str(pod) for pod, cache in enumerate(caches) if cache[: row.node.end] == row.node.prefix}


def test_holders_are_unknown_below_what_was_looked_up() -> None:
    rows = choose_nodes(build_tree([chain(1, 2), chain(1, 3)]), 100)
    leaf = next(place for place, row in enumerate(rows) if row.is_leaf)
    assert find_holders(rows, {leaf: {"a": 16}}, BLOCK_TOKENS) == [{"a"}, set(), None]
    assert find_holders(rows, {}, BLOCK_TOKENS) == [None, None, None]


def test_a_conversation_of_a_thousand_turns_needs_no_recursion() -> None:
    longest = chain(*range(1000))
    root = build_tree(longest[: turn + 1] for turn in range(1000))
    rows = choose_nodes(root, 100)
    assert root.requests == 1000 and len(rows) == 100 and rows[-1].closes == len(rows)
