"""Chained 64-bit hashes of token blocks: equal hashes mean an equal prefix, in router and worker alike.

A chain starts at a root that covers everything except tokens that determines a KV block (model revision, tokenizer, block size, adapter,
tenant salt), so blocks of different models never match. Each block's hash covers its parent's, so it identifies the whole prefix up to the
block's end. Only full blocks have a hash.

64 bits: at 10^8 blocks in one namespace a false match has probability 10^-11 for each unknown block queried, and it only misroutes a
request: the worker attaches KV by its own full comparison.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from xxhash import xxh3_64_intdigest

from fairlead_common.prompts.encoder import PromptFormat

Tokens = Sequence[int]  # an array("I") is fastest

_PERSON = b"fairlead-block-1"  # a new hash scheme needs a new name here, so that its hashes never match the old ones
_TOKEN_BYTES = 4
_BIG_ENDIAN = sys.byteorder == "big"


def chain_root(model: str, tokenizer: str, block_tokens: int, adapter: str = "", salt: str = "") -> int:
    """Return the parent of every first block. `model` and `tokenizer` are digests.

    `salt` separates tenants: derive it from a server key, never take it from a request body.
    """
    state = blake2b(digest_size=8, person=_PERSON)
    for field in (model, tokenizer, str(block_tokens), adapter, salt):
        data = field.encode()
        state.update(len(data).to_bytes(4, "little"))  # length-prefixed: no two field lists share an encoding
        state.update(data)
    return int.from_bytes(state.digest(), "little")


def prompt_root(prompt_format: PromptFormat, adapter: str = "", salt: str = "") -> int:
    """Return the root of the block hashes of prompts in `prompt_format`. `adapter`: the adapter's digest."""
    return chain_root(prompt_format.model_digest, prompt_format.tokenizer_digest, prompt_format.block_tokens, adapter, salt)


def extend(parent: int, tokens: Tokens) -> int:
    """Return the hash of one block: xxh3_64(parent as 8 bytes, then each token as 4 bytes, all little-endian)."""
    return xxh3_64_intdigest(parent.to_bytes(8, "little") + token_bytes(tokens))


def block_hashes(root: int, tokens: Tokens, block_tokens: int) -> "array[int]":
    """Return the hashes `[len(tokens) // block_tokens]` of the full blocks of `tokens`, the first chained to `root`."""
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}: it must be at least 1")
    data = token_bytes(tokens)
    stride = block_tokens * _TOKEN_BYTES
    hashes = array("Q")
    parent = root
    for offset in range(0, len(data) - stride + 1, stride):
        parent = xxh3_64_intdigest(parent.to_bytes(8, "little") + data[offset : offset + stride])
        hashes.append(parent)
    return hashes


def token_bytes(tokens: Tokens) -> bytes:
    """Return tokens as little-endian uint32, the form for hashes and for requests to workers. Raises OverflowError outside 0..2^32-1."""
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    return _swap_bytes(packed).tobytes() if _BIG_ENDIAN else packed.tobytes()


def tokens_from_bytes(data: bytes | bytearray | memoryview) -> "array[int]":
    """Return tokens from `token_bytes`. Raises ValueError unless `data` is a whole number of tokens."""
    tokens = array("I")
    tokens.frombytes(data)
    return _swap_bytes(tokens) if _BIG_ENDIAN else tokens


def hash_bytes(hashes: Sequence[int]) -> bytes:
    """Return hashes as the index stores them: 8 bytes each, little-endian."""
    packed = hashes if isinstance(hashes, array) and hashes.typecode == "Q" else array("Q", hashes)
    return _swap_bytes(packed).tobytes() if _BIG_ENDIAN else packed.tobytes()


def hashes_from_bytes(data: bytes | memoryview) -> "array[int]":
    """Return hashes from `hash_bytes`. Raises ValueError unless `data` is a whole number of hashes."""
    hashes = array("Q")
    hashes.frombytes(data)
    return _swap_bytes(hashes) if _BIG_ENDIAN else hashes


def _swap_bytes(values: "array[int]") -> "array[int]":
    copy = values[:]
    copy.byteswap()
    return copy
