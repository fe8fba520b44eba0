"""Prefix warm-up: a new worker computes the prefixes that other workers' clients share most, within time and memory limits, before it
serves.

Peers are the addresses of `FAIRLEAD_PEERS`, never those in the index: write access to Redis must not be enough to feed a worker. A peer
with the same prompt format (model, tokenizer, block size) returns token ids under root hashes at its admin port, so a tenant's prefix
matches only under the tenant's salt. Token ids are prompts. A peer returns them only to workers that hold the service's own Redis
credential.
"""

import asyncio
import hmac
import logging
import random
import time
from contextlib import ExitStack

import msgspec

from fairlead_common.discovery import create_source
from fairlead_common.http.inference_paths import with_port
from fairlead_index.hashing import tokens_from_bytes
from fairlead_index.redis.access import RedisAccess
from fairlead_worker.api.engine.generation import Generation
from fairlead_worker.api.worker import Worker
from fairlead_worker.config import WorkerConfig
from fairlead_worker.ipc.messages import Sampling, Submit

logger = logging.getLogger(__name__)

MAX_TOKENS = 1 << 20
"""Limit of one response: 4 MiB."""
MAX_BYTES = 8 << 20
"""Limit of one response: its tokens and their encoding."""
MAX_PEERS = 3
"""Peers to try, one after the other in random order."""
PEER_SECONDS = 3.0


class WarmPrefix(msgspec.Struct, frozen=True, array_like=True):
    """A prefix for a peer to compute: whole pages of token ids (uint32) under a root hash."""

    root: int
    tokens: bytes
    adapter: str = ""
    """Digest of the LoRA adapter; empty: the base model. Adapter numbers differ between workers."""


class HotPrefixesReply(msgspec.Struct, frozen=True):
    """A peer's response."""

    format: str
    """ETag of the peer's prompt format. With another format, its tokens and root hashes mean nothing here."""
    prefixes: tuple[WarmPrefix, ...]


def should_warm_up(config: WorkerConfig) -> bool:
    """Return whether warm-up is configured and there are peers."""
    return bool(config.warmup_tokens and config.peers)


def build_bearer(redis: RedisAccess | None) -> str:
    """Return the `Authorization` value that workers of one service share, or an empty string if Redis has no password.

    It is an HMAC of the password of the service's worker user and does not reveal it. Raise OSError if the password file is missing.
    """
    password = redis.login()[1] if redis is not None else ""
    return "Bearer " + hmac.digest(password.encode(), b"fairlead hot prefixes", "sha256").hex() if password else ""


async def warm_up(worker: Worker) -> None:
    """Warm up within `warmup_timeout`. Never raise: a cold worker serves too."""
    config, began = worker.config, time.monotonic()
    try:
        async with asyncio.timeout(config.warmup_timeout):
            peer, prefixes = await _fetch_from_peers(worker)
            tokens = await _compute(worker, prefixes) if prefixes else 0
    except TimeoutError:
        logger.info("warm-up ended after %g s (FAIRLEAD_WARMUP_TIMEOUT)", config.warmup_timeout)
    except Exception as error:
        logger.warning("warm-up failed, which only costs time: %s: %s", type(error).__name__, error)
    else:
        what = f"{len(prefixes)} prefixes, {tokens} tokens from {peer}" if prefixes else "no peer has a prefix that requests share"
        logger.info("warmed in %.1f s: %s", time.monotonic() - began, what)


async def _fetch_from_peers(worker: Worker) -> tuple[str, tuple[WarmPrefix, ...]]:
    """Return the first peer with prefixes, and the prefixes."""
    import httpx  # imported late with its dependencies, because most workers never need it

    config, ready = worker.config, worker.ready
    budget = min(config.warmup_tokens, ready.pages * ready.page_size // 2, MAX_TOKENS)
    peers = await create_source(config.peers, "FAIRLEAD_PEERS").addresses() - {worker.address}
    headers = {"authorization": build_bearer(config.redis)}
    async with httpx.AsyncClient(timeout=PEER_SECONDS, trust_env=False, headers=headers) as client:
        for peer in random.sample(sorted(peers), min(MAX_PEERS, len(peers))):
            try:
                admin = with_port(peer, config.admin_port or None)  # the peers belong to the same Deployment
                async with client.stream("GET", f"http://{admin}/internal/hot-prefixes/{budget}") as answer:
                    body = bytearray()
                    async for chunk in answer.raise_for_status().aiter_bytes():
                        body += chunk
                        if len(body) > MAX_BYTES:
                            raise httpx.HTTPError(f"the answer is longer than {MAX_BYTES} bytes")
                reply = msgspec.msgpack.decode(body, type=HotPrefixesReply)
            except (httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError) as error:
                logger.info("peer %s did not return its prefixes: %s: %s", peer, type(error).__name__, error)
                continue
            if reply.format == worker.prompt_etag and reply.prefixes:
                return peer, reply.prefixes
    return "", ()


async def _compute(worker: Worker, prefixes: tuple[WarmPrefix, ...]) -> int:
    """Run each prefix through the engine, hottest first, and return the number of tokens.

    Omit prefixes that the engine would refuse, and those of adapters that this worker has not loaded.
    """
    with ExitStack() as held:
        infos = [held.enter_context(worker.adapters.use(adapter.info.name)) for adapter in worker.adapters]
        numbers = {"": 0} | {info.digest: info.number for info in infos if info}
        submits = [
            Submit("", tokens, _ONE_TOKEN, prefix.root, adapter=numbers[prefix.adapter])
            for prefix in prefixes
            if prefix.adapter in numbers and (tokens := _valid_tokens(worker, prefix))
        ]
        async with Generation(worker.engine, submits) as generation:
            async for _ in generation.outputs():
                pass
    return sum(len(each.tokens) // 4 for each in submits)


def _valid_tokens(worker: Worker, prefix: WarmPrefix) -> bytes:
    """Return the prefix's tokens, or none if they are not in this model's vocabulary: a larger id would index past the embedding."""
    tokens = tokens_from_bytes(prefix.tokens)
    return prefix.tokens if tokens and max(tokens) < worker.ready.vocabulary_size else b""


_ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
