"""Prompt formats, fetched from the workers: how this model's prompts become tokens and block hashes. The router needs no model volume."""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

import msgspec

from fairlead_index.prompt import PromptEncoder, PromptError, PromptFormat
from fairlead_router.pool import Pool
from fairlead_router.upstream import UpstreamError

logger = logging.getLogger(__name__)

FETCH_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class KnownFormat:
    tag: str
    """The worker's ETag, or a digest of the body where it sent none."""
    encoder: PromptEncoder
    root: int

    @property
    def format(self) -> PromptFormat:
        return self.encoder.format


class PromptFormats:
    """Formats by tag; `current` is the one that most usable workers have (two during a rollout that changes the model)."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._known: dict[str, KnownFormat] = {}
        self.current: KnownFormat | None = None

    async def learn(self, pool: Pool, tag: str) -> str:
        """The tag of one worker's format, fetched if it is new. On failure the tag known before; without one, the worker gets text."""
        tags = ", ".join(self._known)
        try:
            head, body = await pool.fetch("/internal/prompt-format", FETCH_SECONDS, {"if-none-match": tags} if tags else None)
            said = (head.get(b"etag") or b"").decode("latin-1")
            if head.status == 304:
                return said if said in self._known else tag
            if head.status != 200:
                raise UpstreamError(f"status {head.status}")
            new = said or hashlib.blake2b(body, digest_size=16).hexdigest()
            if new not in self._known:
                self._known[new] = await asyncio.get_running_loop().run_in_executor(self._threads, _load, new, body)
                logger.info("prompt format %s of %s: models %s", new, pool.address, self._known[new].format.model_names)
            return new
        except (UpstreamError, TimeoutError, msgspec.MsgspecError, PromptError) as error:
            logger.warning("the prompt format of %s could not be used: %s", pool.address, error)
            return tag

    def elect(self, tags: Iterable[str]) -> None:
        """Choose the current format by what the usable workers have; forget those that none has, but the last one."""
        count = Counter(tag for tag in tags if tag in self._known)
        if not count:
            return
        best = max(count, key=lambda tag: (count[tag], tag == (self.current.tag if self.current else "")))
        self.current = self._known[best]
        self._known = {tag: known for tag, known in self._known.items() if tag in count}

    def model_names(self) -> list[str]:
        """Every served model name, sorted."""
        return sorted({name for known in self._known.values() for name in known.format.model_names})

    def max_model_len(self, name: str) -> int | None:
        return next((known.format.max_model_len for known in self._known.values() if name in known.format.model_names), None)


def _load(tag: str, body: bytes) -> KnownFormat:
    encoder = PromptEncoder(msgspec.json.decode(body, type=PromptFormat))
    return KnownFormat(tag, encoder, encoder.format.root())
