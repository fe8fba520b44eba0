"""Choice of the prefix cache that suits a model's layers."""

from fairlead_worker.cache.grouped import GroupedPrefixCache
from fairlead_worker.cache.grouped_host import TieredGroupedCache
from fairlead_worker.cache.groups import CacheGroups
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import ExtendHash, PrefixCache
from fairlead_worker.cache.states import StatePrefixCache, StateSlots


def make_cache(
    pool: PagePool,
    block_tokens: int,
    extend_hash: ExtendHash,
    *,
    host_slots: int = 0,
    groups: CacheGroups | None = None,
    chunk_tokens: int = 0,
    states: StateSlots | None = None,
) -> PrefixCache:
    """Return the prefix cache of a model. `groups`: None if each page holds all layers. `states`: None if no layer is recurrent."""
    if states is not None:
        assert groups is None, "with recurrent layers each page holds all layers that have KV"
        return StatePrefixCache(pool, block_tokens, extend_hash, states, host_slots)
    if groups is None:
        return PrefixCache(pool, block_tokens, extend_hash, host_slots)
    if host_slots:
        return TieredGroupedCache(pool, block_tokens, extend_hash, groups, chunk_tokens, host_slots)
    return GroupedPrefixCache(pool, block_tokens, extend_hash, groups, chunk_tokens)
