"""Computes the prefixes that clients of other workers share most, before a new worker takes requests: bounded in time and memory.

Peers are the addresses that `--peers` names, never those of the index: whoever may write to Redis must not be able to feed a worker.
A peer of the same prompt format (model, tokenizer, block size) tells token ids under root numbers at its admin port, so a tenant's prefix
is found again only under the tenant's salt. Token ids are prompts: a peer tells them only to workers that hold the service's own Redis
credential.
"""

import asyncio
import hmac
import logging
import random
import time
from array import array

import msgspec

from fairlead_common.discovery import source_of
from fairlead_common.http.inference_paths import with_port
from fairlead_index.hashing import tokens_from_bytes
from fairlead_index.redis.access import RedisAccess
from fairlead_worker.api.engine.client import Submission
from fairlead_worker.api.worker import Worker
from fairlead_worker.config import WorkerConfig
from fairlead_worker.messages import HotPrefix, Sampling

logger = logging.getLogger(__name__)

MAX_TOKENS = 1 << 20
"""That one answer may hold: 4 MiB."""
MAX_BYTES = 8 << 20
"""Of one answer: its tokens, and what stands around them."""
MAX_PEERS = 3
"""Asked one after the other, in random order."""
PEER_SECONDS = 3.0


class HotPrefixes(msgspec.Struct, frozen=True):
    """A peer's answer."""

    format: str
    """ETag of its prompt format: with another one, neither its tokens nor its roots mean anything here."""
    prefixes: tuple[HotPrefix, ...]


def should_warm_up(config: WorkerConfig) -> bool:
    """Return whether there is anything to warm, and peers to ask."""
    return bool(config.warm_tokens and config.peers)


def build_bearer(redis: RedisAccess | None) -> str:
    """Return the `Authorization` value that workers of one service know each other by; empty where Redis asks for no password.

    An HMAC of the password of the service's worker user: it does not give the password away. Raises OSError when that has no file.
    """
    password = redis.credentials()[1] if redis is not None else ""
    return "Bearer " + hmac.digest(password.encode(), b"fairlead hot prefixes", "sha256").hex() if password else ""


async def warm_up(worker: Worker) -> None:
    """Ends within --warm-seconds, and does not raise: a cold worker serves too."""
    config, began = worker.config, time.monotonic()
    try:
        async with asyncio.timeout(config.warm_seconds):
            peer, prefixes = await _fetch_from_peers(worker)
            tokens = await _compute(worker, prefixes) if prefixes else 0
    except TimeoutError:
        logger.info("warming has ended after %g s (--warm-seconds)", config.warm_seconds)
    except Exception as error:
        logger.warning("not warmed, which costs only time: %s: %s", type(error).__name__, error)
    else:
        what = f"{len(prefixes)} prefixes, {tokens} tokens from {peer}" if prefixes else "no peer has a prefix that requests share"
        logger.info("warmed in %.1f s: %s", time.monotonic() - began, what)


async def _fetch_from_peers(worker: Worker) -> tuple[str, tuple[HotPrefix, ...]]:
    """Return the first peer that tells any prefixes, and these."""
    import httpx  # and what it brings: most workers never need it

    config, ready = worker.config, worker.ready
    room = min(config.warm_tokens, ready.pages * ready.page_size // 2, MAX_TOKENS)
    peers = await source_of(config.peers, "--peers").addresses() - {worker.address}
    headers = {"authorization": build_bearer(config.redis)}
    async with httpx.AsyncClient(timeout=PEER_SECONDS, trust_env=False, headers=headers) as client:
        for peer in random.sample(sorted(peers), min(MAX_PEERS, len(peers))):
            try:
                admin = with_port(peer, config.admin_port or None)  # the peers are of the same Deployment
                async with client.stream("GET", f"http://{admin}/internal/hot-prefixes/{room}") as answer:
                    body = bytearray()
                    async for chunk in answer.raise_for_status().aiter_bytes():
                        body += chunk
                        if len(body) > MAX_BYTES:
                            raise httpx.HTTPError(f"the answer is longer than {MAX_BYTES} bytes")
                reply = msgspec.msgpack.decode(body, type=HotPrefixes)
            except (httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError) as error:
                logger.info("peer %s does not tell its prefixes: %s: %s", peer, type(error).__name__, error)
                continue
            if reply.format == worker.prompt_etag and reply.prefixes:
                return peer, reply.prefixes
    return "", ()


async def _compute(worker: Worker, prefixes: tuple[HotPrefix, ...]) -> int:
    """Runs each prefix through the engine, the hottest first; how many tokens. Those that the engine refuses are left out."""
    submissions = [Submission(tokens, _ONE_TOKEN, prefix.root) for prefix in prefixes if (tokens := _valid_tokens(worker, prefix))]
    async with worker.engine.generate(submissions) as generation:
        async for _ in generation.outputs():
            pass
    return sum(len(each.tokens) for each in submissions)


def _valid_tokens(worker: Worker, prefix: HotPrefix) -> "array[int]":
    """Its tokens; none where they are not of this model after all, for a stray id would index past the embedding."""
    tokens = tokens_from_bytes(prefix.tokens)
    return tokens if tokens and max(tokens) < worker.ready.vocabulary_size else array("I")


_ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
