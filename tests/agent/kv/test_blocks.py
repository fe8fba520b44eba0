"""The index gets exactly the blocks that a new prompt could reuse in the engine."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.agent.kv.engine_pool import BLOCK, Pool, Traffic, root_of

from fairlead_agent.kv.blocks import EngineBlocks
from fairlead_agent.kv.events import Cleared, Event, Removed, Stored, decode_batch
from fairlead_index.changes import Changes
from fairlead_index.hashing import block_hashes, chain_root

FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys", "group_idx")


class Index:
    """The held set of a real writer, which must always be prefix-closed."""

    def __init__(self) -> None:
        self.changes = Changes()
        self.resets = 0
        self._parents: dict[int, int] = {}

    def store(self, hashes: list[int], parent: int) -> None:
        self.changes.store(hashes, parent)
        for value in hashes:
            self._parents[value], parent = parent, value

    def remove(self, hashes: list[int]) -> None:
        self.changes.remove(hashes)
        left = set(self.changes.held)
        for value in left:
            above = self._parents[value]
            assert above not in self._parents or above in left, "a parent was removed before its child"

    def reset(self) -> None:
        self.changes, self.resets = Changes(), self.resets + 1
        self._parents.clear()

    @property
    def held(self) -> set[int]:
        return set(self.changes.held)


def encode(events: list[dict[str, Any]], as_maps: bool) -> bytes:
    """Return a batch as vLLM encodes it: structs as maps, or as arrays in older versions and SGLang."""
    if not as_maps:
        events = [
            [event["type"], *(event[name] for name in FIELDS if name in event)]  # type: ignore[misc]
            if event["type"] == "BlockStored"
            else [event["type"], *(value for name, value in event.items() if name != "type")]
            for event in events
        ]
    return msgspec.msgpack.encode([1.5, events, 0])


def decode(events: list[dict[str, Any]], as_maps: bool = True) -> list[Event]:
    return decode_batch(encode(events, as_maps))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1 << 30), size=st.integers(12, 60), steps=st.integers(1, 120), as_maps=st.booleans(), clears=st.booleans())
def test_the_index_has_what_the_engine_can_reuse(seed: int, size: int, steps: int, as_maps: bool, clears: bool) -> None:
    pool, index = Pool(size), Index()
    traffic, blocks = Traffic(pool, seed), EngineBlocks(BLOCK, root_of, index)
    for step in range(steps):
        traffic.step()
        if clears and step == steps // 2:
            pool = traffic.pool = Pool(size)
            traffic = Traffic(pool, seed)
            pool.clear()
        blocks.apply(decode(pool.take_events(), as_maps))
        assert index.held == pool.usable


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1 << 30), lost=st.sets(st.integers(0, 79), min_size=1), size=st.integers(12, 60))
def test_nothing_is_claimed_that_the_engine_may_not_hold(seed: int, lost: set[int], size: int) -> None:
    """After lost events, the index has a part of what the engine can reuse, and grows by use."""
    pool, index = Pool(size), Index()
    traffic, blocks = Traffic(pool, seed), EngineBlocks(BLOCK, root_of, index)
    for step in range(80):
        traffic.step()
        events = decode(pool.take_events())
        if step in lost:
            blocks.mark_uncertain()
            assert not index.held
        else:
            blocks.apply(events)
        assert index.held <= pool.usable


def test_a_prefix_is_claimed_again_when_a_request_continues_it() -> None:
    pool, index = Pool(20), Index()
    blocks = EngineBlocks(BLOCK, root_of, index)
    first = list(range(3 * BLOCK))
    pool.finish(pool.start(first))
    blocks.apply(decode(pool.take_events()))
    blocks.mark_uncertain()
    pool.finish(pool.start(first + [7] * BLOCK))
    blocks.apply(decode(pool.take_events()))
    assert index.held == set(block_hashes(root_of("", ""), first + [7] * BLOCK, BLOCK))


def test_a_block_computed_twice_is_held_until_both_copies_are_evicted() -> None:
    index = Index()
    blocks = EngineBlocks(BLOCK, root_of, index)
    stored = Stored([b"a"], None, [1, 2, 3, 4], BLOCK, medium="GPU")
    blocks.apply([stored, stored, Removed([b"a"], "GPU")])
    assert len(index.held) == 1
    blocks.apply([Removed([b"a"], "GPU")])
    assert not index.held
    assert len(blocks) == 0


def test_a_copy_in_host_memory_keeps_a_block() -> None:
    index = Index()
    blocks = EngineBlocks(BLOCK, root_of, index)
    blocks.apply([Stored([b"a"], None, [1, 2, 3, 4], BLOCK, medium="GPU"), Stored([b"a"], None, [], BLOCK, medium="CPU")])
    blocks.apply([Removed([b"a"], "GPU")])
    assert len(index.held) == 1
    blocks.apply([Removed([b"a"], "CPU")])
    assert not index.held


def test_children_of_an_evicted_block_return_with_it() -> None:
    index = Index()
    blocks = EngineBlocks(BLOCK, root_of, index)
    a, b = Stored([b"a"], None, [1] * BLOCK, BLOCK), Stored([b"b"], b"a", [2] * BLOCK, BLOCK)
    blocks.apply([a, b, Removed([b"a"])])
    assert not index.held
    blocks.apply([a])
    assert index.held == set(block_hashes(root_of("", ""), [1] * BLOCK + [2] * BLOCK, BLOCK))


def test_images_have_no_hash_by_tokens_alone() -> None:
    """The content of an image is not among the tokens, so two prompts with other images would have the same hashes."""
    index = Index()
    blocks = EngineBlocks(BLOCK, root_of, index)
    blocks.apply([Stored([b"a", b"b", b"c"], None, [1] * 3 * BLOCK, BLOCK, extra_keys=[None, [["image", 0]], None])])
    assert index.held == set(block_hashes(root_of("", ""), [1] * BLOCK, BLOCK))


def test_an_adapter_without_a_name_is_not_claimed() -> None:
    index = Index()
    EngineBlocks(BLOCK, root_of, index).apply([Stored([1], None, [1] * BLOCK, BLOCK, lora_id=3)])
    assert not index.held


def test_groups_of_other_layers_are_ignored() -> None:
    index = Index()
    blocks = EngineBlocks(BLOCK, root_of, index)
    window = {"group": 1, "kind": "sliding_window"}
    blocks.apply(
        [Stored([b"a"], None, [1] * BLOCK, BLOCK, group=0, kind="full_attention"), Stored([b"a"], None, [1] * BLOCK, BLOCK, **window)]
    )
    blocks.apply([Removed([b"a"], None, 1)])
    assert len(index.held) == 1
    blocks.apply([Removed([b"a"], None, 0)])
    assert not index.held


@pytest.mark.parametrize("evicted", [0, 1, 2, 3, 4])
def test_a_block_of_the_index_may_span_several_of_the_engine(evicted: int) -> None:
    index = Index()
    blocks = EngineBlocks(2 * BLOCK, lambda adapter, salt: chain_root("model", "tokenizer", 2 * BLOCK, adapter, salt), index)
    tokens = list(range(5 * BLOCK))
    blocks.apply([Stored([0, 1, 2, 3, 4], None, tokens, BLOCK)])
    for key in range(4, 4 - evicted, -1):
        blocks.apply([Removed([key])])
    whole = block_hashes(chain_root("model", "tokenizer", 2 * BLOCK, "", ""), tokens, 2 * BLOCK)
    assert index.held == set(whole[: (5 - evicted) // 2])


def test_unknown_events_and_fields_are_ignored() -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": [5],
        "parent_block_hash": None,
        "token_ids": [1],
        "block_size": 1,
        "lora_id": None,
        "new": 1,
    }
    assert decode_batch(
        msgspec.msgpack.encode({"ts": 1.0, "events": [{"type": "BlockMigrated"}, event, {"type": "AllBlocksCleared"}]})
    ) == [
        Stored([5], None, [1], 1),
        Cleared(),
    ]


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode([1.0, [["BlockStored"]]])])
def test_bytes_that_are_no_batch_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="not a batch of KV events"):
        decode_batch(payload)
