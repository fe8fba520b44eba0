"""`POST /query` and `/query_by_hash`: how much of a prompt each worker holds, for gateways that route themselves.

The format is that of Mooncake's Conductor (kvcache-ai/Mooncake, docs: conductor-indexer; RFC #1403) and of Dynamo's standalone
indexer, which follows it. An answer has all fields that their clients read: `instances` (both), `scores` and `frequencies` (Dynamo),
and the tenant's map (Mooncake's first format). Hashes are Fairlead's own (`fairlead_index.hashing`), keyed and chained, so hashes of
other systems match nothing.

A query costs by its hashes and by the fleet. Its hashes are bounded by the model's context, before they are built. It is decoded in slices
of under a millisecond, one query at a time (`IndexLookups`). A thread would hold the interpreter's lock, and stop the event loop longer.
"""

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from itertools import accumulate
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from fairlead_common.truncate import quote
from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_index.reader import IndexUnavailable
from fairlead_router.errors import ApiError, unavailable
from fairlead_router.fleet.prompt_formats import KnownFormat, PromptFormats
from fairlead_router.fleet.workers import SLICE, WorkerTable
from fairlead_router.interop.index_lookups import IndexLookups
from fairlead_router.request.validation import DECODING, decode_error

Name = Annotated[str, Meta(max_length=200)]
Token = Annotated[int, Meta(ge=0, le=2**32 - 1)]
BY_HASH: Final = "/query_by_hash"
PATHS: Final = ("/query", BY_HASH)
HASH_FIELDS: Final = ("seq_hashes", "block_hashes", "block_hash")
_TAKEN: Final = frozenset(("instances", "scores", "frequencies", "block_size", "seq_hashes"))
_RANK: Final = "0"
MAX_TOKENS: Final = 1 << 18
"""Most tokens of a prompt that is queried, also for a model with a longer context, and before any format is known."""
_HASH_BYTES, _TOKEN_BYTES = 24, 12
"""Most bytes of a number with its separator: a hash has 20 digits, a token 7."""
_USUAL_BLOCK: Final = 16
_SLICE_BYTES: Final = 16 << 10
"""Bytes of numbers that are decoded at once, in under half a millisecond."""
_SLICE_TOKENS: Final = 4096
"""Tokens that are hashed at once, in a fifth of a millisecond."""
_OTHER_BYTES: Final = 16 << 10
"""Most bytes of the other fields."""


class _Query(msgspec.Struct):
    model: Name | None = None
    model_name: Name | None = None
    tenant_id: Name | None = None
    lora_name: Name | None = None
    cache_salt: Name | None = None
    block_size: int | None = None
    instance_id: Name | None = None
    token_ids: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    seq_hashes: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    block_hashes: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    block_hash: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    return_hashes: bool = False


_TOKENS: Final = msgspec.json.Decoder(list[Token])
_HASHES: Final = msgspec.json.Decoder(list[int])


class Queries:
    """Queries of one index. `lookups` is None if this router routes without one."""

    def __init__(self, formats: PromptFormats, table: WorkerTable, lookups: IndexLookups | None, threads: Executor) -> None:
        self._formats, self._table, self._lookups, self._threads = formats, table, lookups, threads
        self._decoder = msgspec.json.Decoder(_Query)

    def body_limit(self, path: str) -> int:
        """Return the most bytes of a query's body: numbers for the longest context of the served models, and the other fields."""
        known = self._formats.known()
        if path == BY_HASH:
            numbers = max((_max_tokens(one) // one.format.block_tokens for one in known), default=MAX_TOKENS // _USUAL_BLOCK)
            return _HASH_BYTES * numbers + _OTHER_BYTES
        return _TOKEN_BYTES * max(map(_max_tokens, known), default=MAX_TOKENS) + _OTHER_BYTES

    async def answer(self, path: str, raw: bytes, tenant: str, salt: Callable[[str], str] = lambda given: given) -> bytes:
        """Return the answer to one query. `salt`: returns the (tenant's) cache salt, given the client's own. Raises ApiError."""
        if self._lookups is None:
            raise ApiError(
                501, "This router has no index: give it --policy PrefixAware and --redis-url.", kind="server_error", code="no_index"
            )
        async with self._lookups.turn(tenant):
            query, hashes, block_tokens = await self._read(path, raw, salt)
            try:
                held = await self._lookups.match(hashes)
            except IndexUnavailable as error:
                raise unavailable(f"The index does not answer: {error}.", retry_after=1) from error
            pods = {worker.address: worker.pod for worker in self._table.usable()}
            if len(pods) <= SLICE:
                return _encode(query, hashes, held, pods, block_tokens)
            return await asyncio.get_running_loop().run_in_executor(self._threads, _encode, query, hashes, held, pods, block_tokens)

    async def _read(self, path: str, raw: bytes, salt: Callable[[str], str]) -> "tuple[_Query, array[int], int]":
        try:
            query = self._decoder.decode(raw)
        except msgspec.ValidationError as error:
            reason, _, field = str(error).partition(" - at `$")
            raise _invalid(field.strip("`.") or "body", reason) from None
        except DECODING as error:
            raise decode_error(error) from None
        if query.tenant_id in _TAKEN:
            raise _invalid("tenant_id", f"{quote(query.tenant_id)} is a field of the answer: give another name")
        known = self._known(query)
        block_tokens = known.format.block_tokens
        if query.block_size not in (None, block_tokens):
            raise _invalid("block_size", f"is {query.block_size}: blocks of this model have {block_tokens} tokens")
        if path == BY_HASH:
            name = next((name for name in HASH_FIELDS if _is_given(getattr(query, name))), None)
            if name is None:
                raise _invalid("seq_hashes", "is missing: give the hashes of the prompt's blocks, first to last")
            given = await _numbers(name, getattr(query, name), _HASHES, _max_tokens(known) // block_tokens)
            return query, _hashes(name, given), block_tokens
        if not _is_given(query.token_ids):
            raise _invalid("token_ids", "is missing: give the prompt's token ids")
        tokens = await _numbers("token_ids", query.token_ids, _TOKENS, _max_tokens(known))
        root = prompt_root(known.format, self._adapter(query), salt(query.cache_salt or ""))
        return query, await _hash(root, tokens, block_tokens), block_tokens

    def _known(self, query: _Query) -> KnownFormat:
        name = query.model or query.model_name
        if not name:
            raise _invalid("model", "is missing: give the model's name")
        known = self._formats.of_model(name)
        if known is None:
            raise unavailable("No worker has reported its prompt format yet. Try again in 5 s.", retry_after=5)
        if name not in known.format.model_names and name not in self._table.adapters():
            served = ", ".join(self._formats.model_names())
            raise ApiError(
                404, f"model: {quote(name)} does not exist. Models served here: {served}.", param="model", code="model_not_found"
            )
        return known

    def _adapter(self, query: _Query) -> str:
        """Return the adapter's digest for block hashes; for an unknown name the name itself, which matches nothing."""
        adapters = self._table.adapters()
        name = query.lora_name or query.model or query.model_name or ""
        return adapters[name].digest if name in adapters else query.lora_name or ""


def _max_tokens(known: KnownFormat) -> int:
    """Return the most tokens of a prompt that is queried."""
    return min(known.format.max_model_len, MAX_TOKENS)


def _is_given(raw: msgspec.Raw) -> bool:
    return bytes(raw) not in (b"", b"null")


async def _hash(parent: int, tokens: list[int], block_tokens: int) -> "array[int]":
    """Return `block_hashes` of the tokens, computed in slices."""
    hashes, step = array("Q"), max(1, _SLICE_TOKENS // block_tokens) * block_tokens
    for at in range(0, len(tokens), step):
        hashes += block_hashes(hashes[-1] if hashes else parent, array("I", tokens[at : at + step]), block_tokens)
        if at:
            await asyncio.sleep(0)
    return hashes


async def _numbers(field: str, raw: msgspec.Raw, decoder: "msgspec.json.Decoder[list[int]]", most: int) -> list[int]:
    """Return a list of at most `most` numbers, decoded in slices. Raises ApiError."""
    text = bytes(raw).strip()
    if not (text.startswith(b"[") and text.endswith(b"]")):
        raise _invalid(field, "is no list of integers")
    count = text.count(b",") + 1
    if count > most:
        raise _invalid(field, f"has {count} numbers, and a query {most}, for the model's context: send the first {most}")
    numbers: list[int] = []
    at, end = 1, len(text) - 1
    while at < end:
        comma = text.find(b",", at + _SLICE_BYTES, end)
        until = comma if comma >= 0 else end
        try:
            numbers += decoder.decode(b"[" + text[at:until] + b"]")
        except msgspec.ValidationError as error:
            reason, _, place = str(error).partition(" - at `$[")
            raise _invalid(f"{field}[{len(numbers) + int(place[:-2])}]" if place else field, reason) from None
        except DECODING as error:
            raise decode_error(error) from None
        at = until + 1
        if at < end:
            await asyncio.sleep(0)
    return numbers


def _encode(query: _Query, hashes: "array[int]", held: dict[str, int], pods: Mapping[str, str], block_tokens: int) -> bytes:
    """Return the answer in all forms. `held`: tokens by address. `pods`: names of the usable workers, by address."""
    instance = query.instance_id
    tokens = dict.fromkeys(pods, 0) | held
    tokens = {one: count for one, count in sorted(tokens.items()) if instance is None or instance in (one, pods.get(one))}
    answer: dict[str, Any] = {
        "block_size": block_tokens,
        "instances": {one: _instance(count) | {"pod": pods.get(one, "")} for one, count in tokens.items()},
        "scores": {one: {_RANK: count} for one, count in tokens.items()},
        "frequencies": _frequencies([count // block_tokens for count in tokens.values()]),
        query.tenant_id or "default": {one: _conductor(count) for one, count in tokens.items()},
    }
    if query.return_hashes:
        answer["seq_hashes"] = hashes.tolist()
    return msgspec.json.encode(answer)


def _frequencies(depths: list[int]) -> list[int]:
    """Return how many workers hold the first, second, … block. `depths`: blocks that each worker holds. Linear in blocks and workers."""
    ending = Counter(depths)
    return list(accumulate(ending[depth] for depth in range(max(depths, default=0), 0, -1)))[::-1]


def _hashes(field: str, given: Sequence[int]) -> "array[int]":
    """Return the hashes as unsigned integers. Dynamo sends the same bits as signed ones."""
    if given and not (min(given) >= -(2**63) and max(given) < 2**64):
        raise _invalid(field, "holds a number of more than 64 bits")
    return array("Q", (value % 2**64 for value in given))


def _instance(count: int) -> dict[str, Any]:
    """Return the same count for all tiers: the index does not separate them, since host memory needs no recomputation either."""
    tiers = {"gpu": count, "cpu": count, "disk": count}
    return {"longest_matched": count, "dp": {_RANK: count}, **tiers, "rank_matches": {_RANK: tiers}}


def _conductor(count: int) -> dict[str, Any]:
    return {"longest_matched": count, "GPU": count, "CPU": count, "DISK": count, "DP": {_RANK: count}}


def _invalid(field: str, reason: str) -> ApiError:
    return ApiError(400, f"{field}: {reason}.", param=field)
