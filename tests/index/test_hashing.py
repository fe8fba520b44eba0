from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_index.hashing import block_hashes, chain_root, extend, token_bytes, tokens_from_bytes

tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def test_hash_vectors_never_change() -> None:
    """Routers and workers of different versions share one index: a change here needs a new `_PERSON`."""
    root = chain_root("m", "t", 64)
    assert root == 0x6D895C651B4E57C
    assert list(block_hashes(root, range(128), 64)) == [0xCFDD8DBE4A8A6D1C, 0x45218558013216EB]


@given(tokens_lists, st.integers(1, 64))
def test_only_whole_blocks_are_hashed_and_each_extends_its_parent(tokens: list[int], block: int) -> None:
    root = chain_root("m", "t", block)
    hashes = block_hashes(root, tokens, block)
    assert len(hashes) == len(tokens) // block
    parent = root
    for at, value in enumerate(hashes):
        assert value == extend(parent, tokens[at * block : (at + 1) * block])
        parent = value
    assert hashes == block_hashes(root, array("I", tokens), block)


@given(tokens_lists, tokens_lists)
def test_a_shared_prefix_and_nothing_else_shares_hashes(left: list[int], right: list[int]) -> None:
    root = chain_root("m", "t", 4)
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    a, b = block_hashes(root, left, 4), block_hashes(root, right, 4)
    assert a[: shared // 4] == b[: shared // 4]
    assert not set(a[shared // 4 :]) & set(b)


def test_the_root_separates_all_fields_unambiguously() -> None:
    fields = [("ab", "c", 16), ("a", "bc", 16), ("abc", "", 16), ("ab", "c", 64)]
    roots = {chain_root(*field) for field in fields}
    roots |= {chain_root("ab", "c", 16, adapter="x"), chain_root("ab", "c", 16, salt="x"), chain_root("ab", "c", 16, "x", "x")}
    assert len(roots) == 7


def test_invalid_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="block_tokens is 0"):
        block_hashes(1, [1], 0)
    with pytest.raises(OverflowError):
        block_hashes(1, [2**32], 1)


@given(tokens_lists)
def test_tokens_survive_the_wire(tokens: list[int]) -> None:
    assert list(tokens_from_bytes(token_bytes(tokens))) == tokens
