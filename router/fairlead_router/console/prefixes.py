"""The hottest prefixes of the latest requests, with the pods that hold them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from fairlead_index.reader import IndexUnavailable
from fairlead_router.console.prefix_tree import PrefixNode, ShownNode, build_tree, choose_nodes, find_holders

if TYPE_CHECKING:
    from array import array

MAX_NODES: Final = 100
MAX_LOOKUPS: Final = 50
"""Prefixes that the index is asked for, the longest ones of the hottest branches. Prefixes above them need no question of their own."""
MAX_HOLDERS: Final = 12
"""Holders that a node names; the others are counted."""

LookUp = Callable[[Sequence[int]], Awaitable[Mapping[str, int]]]


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """One shown node, as figures and names."""

    shown: ShownNode
    name: str
    """The first half of the last block's hash, in hexadecimal."""
    tokens: int
    """Tokens of the whole prefix."""
    own_tokens: int
    """Tokens that its parent does not have."""
    share: float
    """Share of the requests that begin with it."""
    holders: Sequence[str] | None
    """Names of at most MAX_HOLDERS pods; None: unknown."""
    num_holders: int


async def describe_prefixes(
    chains: "Iterable[array[int]]", look_up: LookUp | None, block_tokens: int, names: Mapping[str, str]
) -> dict[str, Any]:
    """Return `rows`, `requests` and `reason`, which says why holders are unknown (empty: they are known).

    `look_up`: returns the tokens that each address holds, and raises IndexUnavailable; None: this router has no index. `names`: of pods.
    """
    root, nodes = await asyncio.to_thread(_choose, list(chains))
    held, reason = await _look_up_leaves(nodes, look_up if block_tokens else None)
    holders = find_holders(nodes, held, block_tokens)
    rows = [_row(node, root.requests, block_tokens, found, names) for node, found in zip(nodes, holders, strict=True)]
    return {"rows": rows, "requests": root.requests, "reason": reason}


def _choose(chains: "list[array[int]]") -> tuple[PrefixNode, list[ShownNode]]:
    root = build_tree(chains)
    return root, choose_nodes(root, MAX_NODES)


async def _look_up_leaves(nodes: Sequence[ShownNode], look_up: LookUp | None) -> tuple[dict[int, Mapping[str, int]], str]:
    if look_up is None:
        return {}, "this router reads no index"
    places = [place for place, shown in enumerate(nodes) if shown.is_leaf]
    hottest = sorted(places, key=lambda place: nodes[place].node.heat, reverse=True)[:MAX_LOOKUPS]
    found: dict[int, Mapping[str, int]] = {}
    try:
        for place in hottest:  # one at a time: the queries of other tenants take turns with these
            found[place] = await look_up(nodes[place].node.prefix)
    except IndexUnavailable as error:
        return {}, str(error)
    return found, ""


def _row(shown: ShownNode, requests: int, block_tokens: int, holders: Collection[str] | None, names: Mapping[str, str]) -> PrefixRow:
    node = shown.node
    return PrefixRow(
        shown,
        f"{node.chain[node.end - 1] >> 32:08x}",
        node.end * block_tokens,
        (node.end - node.start) * block_tokens,
        node.requests / requests,
        None if holders is None else sorted(names.get(address, address) for address in holders)[:MAX_HOLDERS],
        len(holders or ()),
    )
