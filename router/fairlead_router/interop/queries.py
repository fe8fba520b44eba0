"""`POST /query` and `/query_by_hash`: how much of a prompt each worker holds, for gateways that route themselves.

The format is that of Mooncake's Conductor (kvcache-ai/Mooncake, docs: conductor-indexer; RFC #1403) and of Dynamo's standalone
indexer, which follows it. An answer has all fields that their clients read: `instances` (both), `scores` and `frequencies` (Dynamo),
and the tenant's map (Mooncake's first format). Hashes are Fairlead's own (`fairlead_index.hashing`), keyed and chained, so hashes of
other systems match nothing.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from fairlead_common.truncate import quote
from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_index.reader import IndexUnavailable
from fairlead_router.errors import ApiError, unavailable
from fairlead_router.fleet.prompt_formats import KnownFormat, PromptFormats
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.request.validation import DECODING, decode_error

Name = Annotated[str, Meta(max_length=200)]
Token = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Match = Callable[[Sequence[int]], Awaitable[dict[str, int]]]

BY_HASH: Final = "/query_by_hash"
PATHS: Final = ("/query", BY_HASH)
_TAKEN: Final = frozenset(("instances", "scores", "frequencies", "block_size", "seq_hashes"))
_RANK: Final = "0"


class _Query(msgspec.Struct):
    model: Name | None = None
    model_name: Name | None = None
    tenant_id: Name | None = None
    lora_name: Name | None = None
    cache_salt: Name | None = None
    block_size: int | None = None
    instance_id: Name | None = None
    token_ids: list[Token] | None = None
    seq_hashes: list[int] | None = None
    block_hashes: list[int] | None = None
    block_hash: list[int] | None = None
    return_hashes: bool = False


class Queries:
    """Queries of one index. `match` is None if this router routes without one."""

    def __init__(self, formats: PromptFormats, table: WorkerTable, match: Match | None, threads: Executor) -> None:
        self._formats, self._table, self._match, self._threads = formats, table, match, threads
        self._decoder = msgspec.json.Decoder(_Query)

    async def answer(self, path: str, raw: bytes, salt: Callable[[str], str] = lambda given: given) -> dict[str, Any]:
        """Return the answer to one query. `salt`: returns the (tenant's) cache salt, given the client's own. Raises ApiError."""
        if self._match is None:
            raise ApiError(
                501, "This router has no index: give it --policy PrefixAware and --redis-url.", kind="server_error", code="no_index"
            )
        query, hashes, block_tokens = await asyncio.get_running_loop().run_in_executor(self._threads, self._read, path, raw, salt)
        try:
            held = await self._match(hashes) if hashes else {}
        except IndexUnavailable as error:
            raise unavailable(f"The index does not answer: {error}.", retry_after=1) from error
        return self._shapes(query, hashes, held, block_tokens)

    def _read(self, path: str, raw: bytes, salt: Callable[[str], str]) -> "tuple[_Query, array[int], int]":
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
            given = next((one for one in (query.seq_hashes, query.block_hashes, query.block_hash) if one is not None), None)
            if given is None:
                raise _invalid("seq_hashes", "is missing: give the hashes of the prompt's blocks, first to last")
            return query, _hashes(given), block_tokens
        if query.token_ids is None:
            raise _invalid("token_ids", "is missing: give the prompt's token ids")
        root = prompt_root(known.format, self._adapter(query), salt(query.cache_salt or ""))
        return query, block_hashes(root, array("I", query.token_ids), block_tokens), block_tokens

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

    def _shapes(self, query: _Query, hashes: "array[int]", held: dict[str, int], block_tokens: int) -> dict[str, Any]:
        pods = {worker.address: worker.pod for worker in self._table.usable()}
        tokens = dict.fromkeys(pods, 0) | held
        instance = query.instance_id
        tokens = {one: count for one, count in sorted(tokens.items()) if instance is None or instance in (one, pods.get(one))}
        deepest = max(tokens.values(), default=0) // block_tokens
        answer: dict[str, Any] = {
            "block_size": block_tokens,
            "instances": {one: _instance(count) | {"pod": pods.get(one, "")} for one, count in tokens.items()},
            "scores": {one: {_RANK: count} for one, count in tokens.items()},
            "frequencies": [sum(count > depth * block_tokens for count in tokens.values()) for depth in range(deepest)],
            query.tenant_id or "default": {one: _conductor(count) for one, count in tokens.items()},
        }
        if query.return_hashes:
            answer["seq_hashes"] = hashes.tolist()
        return answer


def _hashes(given: Sequence[int]) -> "array[int]":
    """Return the hashes as unsigned integers. Dynamo sends the same bits as signed ones."""
    if given and not (min(given) >= -(2**63) and max(given) < 2**64):
        raise _invalid("seq_hashes", "holds a number of more than 64 bits")
    return array("Q", (value % 2**64 for value in given))


def _instance(count: int) -> dict[str, Any]:
    """Return the same count for all tiers: the index does not separate them, since host memory needs no recomputation either."""
    tiers = {"gpu": count, "cpu": count, "disk": count}
    return {"longest_matched": count, "dp": {_RANK: count}, **tiers, "rank_matches": {_RANK: tiers}}


def _conductor(count: int) -> dict[str, Any]:
    return {"longest_matched": count, "GPU": count, "CPU": count, "DISK": count, "DP": {_RANK: count}}


def _invalid(field: str, reason: str) -> ApiError:
    return ApiError(400, f"{field}: {reason}.", param=field)
