"""A new worker computes the prefixes that its peers' clients share most, before it takes requests: bounded, and never in the way.

Peers are the living workers of the same service in the index; one of the same prompt format (model, tokenizer, block size) is asked at
its admin port. What it tells are token ids under root numbers: a tenant's prefix is found again only under the tenant's salt.
"""

import asyncio
import logging
import time
from array import array

import msgspec

from fairlead_index.access import RedisAccess
from fairlead_index.errors import IndexUnavailable
from fairlead_index.groups import index_reader
from fairlead_index.hashing import tokens_from_bytes
from fairlead_index.paths import with_port
from fairlead_worker.api.engine_client import Submission
from fairlead_worker.api.worker import Worker
from fairlead_worker.config import WorkerConfig
from fairlead_worker.messages import HotPrefix, Sampling

logger = logging.getLogger(__name__)

MOST_TOKENS = 1 << 20
"""That one answer may hold: 4 MiB."""
MOST_PEERS = 3
"""Asked one after the other, the least busy first."""
INDEX_TRIES, INDEX_PAUSE = 5, 0.2
"""The index answers within 50 ms or counts as away; a first connection may take longer."""
PEER_SECONDS = 3.0


class HotPrefixes(msgspec.Struct, frozen=True):
    """A peer's answer."""

    format: str
    """ETag of its prompt format: with another one, neither its tokens nor its roots mean anything here."""
    prefixes: tuple[HotPrefix, ...]


def warms(config: WorkerConfig) -> bool:
    """Whether there is anything to warm, and an index to find peers by."""
    return bool(config.warm_tokens) and config.redis is not None


async def warm(worker: Worker) -> None:
    """Ends within --warm-seconds, and does not raise: a cold worker serves too."""
    config, began = worker.config, time.monotonic()
    assert config.redis is not None
    try:
        async with asyncio.timeout(config.warm_seconds):
            peer, prefixes = await _asked(worker, config.redis)
            tokens = await _compute(worker, prefixes) if prefixes else 0
    except TimeoutError:
        logger.info("warming has ended after %g s (--warm-seconds)", config.warm_seconds)
    except Exception as error:
        logger.warning("not warmed, which costs only time: %s: %s", type(error).__name__, error)
    else:
        what = f"{len(prefixes)} prefixes, {tokens} tokens from {peer}" if prefixes else "no peer has a prefix that requests share"
        logger.info("warmed in %.1f s: %s", time.monotonic() - began, what)


async def _asked(worker: Worker, redis: RedisAccess) -> tuple[str, tuple[HotPrefix, ...]]:
    """(peer, its hottest prefixes) of the first peer that tells any."""
    import httpx  # and what it brings: most workers never need it

    ready = worker.ready
    room = min(worker.config.warm_tokens, ready.pages * ready.page_size // 2, MOST_TOKENS)
    async with httpx.AsyncClient(timeout=PEER_SECONDS, trust_env=False) as client:
        for peer in await _peers(worker, redis):
            try:
                admin = with_port(peer, worker.config.admin_port or None)  # the peers are of the same Deployment
                answer = await client.get(f"http://{admin}/internal/hot-prefixes/{room}")
                told = msgspec.msgpack.decode(answer.raise_for_status().content, type=HotPrefixes)
            except (httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError) as error:
                logger.info("peer %s does not tell its prefixes: %s: %s", peer, type(error).__name__, error)
                continue
            if told.format == worker.prompt_etag and told.prefixes:
                return peer, told.prefixes
    return "", ()


async def _peers(worker: Worker, redis: RedisAccess) -> list[str]:
    """Addresses of the service's other workers, the least busy first."""
    reader = index_reader(redis, worker.config.index_namespace, worker.config.index_groups)
    try:
        for left in reversed(range(INDEX_TRIES)):
            try:
                living = await reader.workers()
                break
            except IndexUnavailable:
                if not left:
                    raise
                await asyncio.sleep(INDEX_PAUSE)
    finally:
        await reader.close()
    others = [one for one in living if one.address != worker.address and one.pod != worker.config.pod]
    return [one.address for one in sorted(others, key=lambda one: (one.load.backlog_tokens, one.pod))][:MOST_PEERS]


async def _compute(worker: Worker, prefixes: tuple[HotPrefix, ...]) -> int:
    """Runs each prefix through the engine, the hottest first; how many tokens. Those that the engine refuses are left out."""
    submissions = [Submission(tokens, _ONE_TOKEN, prefix.root) for prefix in prefixes if (tokens := _known(worker, prefix))]
    async with worker.engine.generate(submissions) as generation:
        async for _ in generation.outputs():
            pass
    return sum(len(each.tokens) for each in submissions)


def _known(worker: Worker, prefix: HotPrefix) -> "array[int]":
    """Its tokens; none where they are not of this model after all, for a stray id would index past the embedding."""
    tokens = tokens_from_bytes(prefix.tokens)
    return tokens if tokens and max(tokens) < worker.ready.vocabulary_size else array("I")


_ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
