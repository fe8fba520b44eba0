"""Prompt formats, fetched from the workers: how prompts become tokens and block hashes. The router therefore needs no model volume."""

import asyncio
import hashlib
import logging
import zlib
from collections import Counter
from collections.abc import Collection
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import msgspec

from fairlead_common.prompts.encoder import PromptEncoder, PromptError, PromptFormat
from fairlead_common.prompts.token_cache import TokenCache
from fairlead_index.hashing import prompt_root
from fairlead_router.wire.connection_pool import ConnectionPool
from fairlead_router.wire.upstream import Head, UpstreamError

logger = logging.getLogger(__name__)

PATH = "/internal/prompt-format"
FormatOf = tuple[str, str]
"""The revision whose canary a worker is (empty: none), and the tag of its format."""
FETCH_SECONDS = 20.0
MAX_BYTES = 256 << 20
"""Limit of an uncompressed format. The largest tokenizers have 40 MB."""


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
    """Formats by tag. `current` is the one that most usable workers have (two exist during a rollout that changes the model).

    A canary's format is used only for requests to canaries, and if there are no other workers.
    """

    def __init__(self, threads: Executor, cache: TokenCache) -> None:
        self._threads, self.cache = threads, cache
        self._known: dict[str, KnownFormat] = {}
        self._formats_by_name: Counter[str] = Counter()
        """Number of formats with each model name. It is replaced, never mutated, because threads read it."""
        self._loading: dict[str, asyncio.Event] = {}
        """Formats being loaded from one worker. Other workers with the same format wait for it."""
        self._unusable: set[str] = set()
        """Formats that cannot be used here and are not fetched again."""
        self.current: KnownFormat | None = None
        self._counts: dict[str, Counter[str]] = {}
        """Number of usable workers with each format, by the revision whose canary they are (empty: none)."""
        self._of_canary: dict[str, KnownFormat] = {}
        """Formats of canaries, by revision."""

    async def fetch(self, pool: ConnectionPool, tag: str) -> str:
        """Return the tag of one worker's format, fetched if it is new; empty if it cannot be used: then the worker gets text.

        If the worker does not answer, return `tag`. The tag is sent with token ids, and a worker with another format by then does not
        accept them.
        """
        try:
            fetched = await self._fetch_tag(pool)
            return fetched if fetched in self._known else ""
        except (UpstreamError, TimeoutError) as error:
            logger.warning("the prompt format of %s could not be fetched: %s", pool.address, error or f"nothing within {FETCH_SECONDS:g} s")
            return tag

    async def _fetch_tag(self, pool: ConnectionPool) -> str:
        """Return the tag that the worker reports. Raises UpstreamError, TimeoutError."""
        headers = {"accept-encoding": "gzip"}
        if tags := [*self._known, *self._unusable]:
            headers["if-none-match"] = ", ".join(tags)
        claimed: list[str] = []

        def read_body(head: Head) -> bool:
            tag = _tag(head)
            if head.status == 200 and tag in self._loading:
                return False
            if head.status == 200 and tag:
                self._loading[tag] = asyncio.Event()
                claimed.append(tag)
            return True

        try:
            head, body = await pool.fetch(PATH, FETCH_SECONDS, headers, read_body)
            tag = _tag(head)
            if head.status == 304:
                return tag
            if head.status != 200:
                raise UpstreamError(f"status {head.status}")
            if tag and not claimed:
                if loading := self._loading.get(tag):  # else the other fetch has ended meanwhile
                    async with asyncio.timeout(FETCH_SECONDS):
                        await loading.wait()
                return tag
            tag = tag or hashlib.blake2b(body, digest_size=16).hexdigest()
            if tag not in self._known and tag not in self._unusable:
                await self._load(tag, pool.address, body, head.get(b"content-encoding") == b"gzip")
            return tag
        finally:
            for tag in claimed:
                self._loading.pop(tag).set()

    async def _load(self, tag: str, address: str, body: bytes, is_gzip: bool) -> None:
        try:
            loop = asyncio.get_running_loop()
            known = await loop.run_in_executor(self._threads, _read, tag, body, is_gzip, self.cache)
            self._set_known({**self._known, tag: known})
            logger.info("prompt format %s of %s: models %s", tag, address, known.format.model_names)
        except (msgspec.MsgspecError, PromptError, zlib.error, ValueError) as error:
            self._unusable.add(tag)
            logger.warning("the prompt format %s of %s cannot be used, prompts go to such workers as text: %s", tag, address, error)

    def count(self, old: FormatOf | None, new: FormatOf | None) -> None:
        """Count the format of a usable worker instead of the one that it had; None: it is not usable."""
        for each, step in ((old, -1), (new, 1)):
            if each is not None:
                canary, tag = each
                counts = self._counts.setdefault(canary, Counter())
                counts[tag] += step
                if not counts[tag]:
                    del counts[tag]

    def choose_current(self) -> None:
        """Choose the current format by the usable workers' majority, and drop formats that none of them has, but never the last one."""
        by_canary = {canary: Counter({tag: count[tag] for tag in count if tag in self._known}) for canary, count in self._counts.items()}
        by_canary = {canary: count for canary, count in by_canary.items() if count}
        if not by_canary:
            return
        all_tags = sum(by_canary.values(), Counter[str]())
        best = {canary: self._known[self._most_common(count)] for canary, count in by_canary.items()}
        self.current = best.pop("", None) or self._known[self._most_common(all_tags)]
        self._of_canary = best
        if len(all_tags) < len(self._known):
            self._set_known({tag: known for tag, known in self._known.items() if tag in all_tags})

    def _set_known(self, known: dict[str, KnownFormat]) -> None:
        self._known = known
        self._formats_by_name = Counter(name for one in known.values() for name in set(one.format.model_names))

    def _most_common(self, count: "Counter[str]") -> str:
        return max(count, key=lambda tag: (count[tag], tag == (self.current.tag if self.current else "")))

    def of_model(self, name: Any, canary: str = "") -> KnownFormat | None:
        """Return the format for this model's prompts: the current one, unless only another format has the name.

        `canary`: use the format of this revision's canaries, if they have one.
        """
        current = self._of_canary.get(canary, self.current)
        if current is None or not isinstance(name, str) or name in current.format.model_names:
            return current
        return next((known for known in self._known.values() if name in known.format.model_names), current)

    def known(self) -> Collection[KnownFormat]:
        """Return all formats of the workers."""
        return self._known.values()

    def longest_prompt(self) -> int:
        """Return the longest context of any format, in tokens; 0 without one."""
        return max((known.format.max_model_len for known in self._known.values()), default=0)

    def find(self, tag: str) -> KnownFormat | None:
        return self._known.get(tag)

    def with_same_tokens(self, known: KnownFormat) -> list[KnownFormat]:
        """Return the other formats that give every prompt of this model the same tokens: while another engine or model is rolled out.

        Their block hashes differ. Without them, the workers of the smaller side would seem to hold nothing.
        """
        others = [one for one in self._known.values() if one.root != known.root]
        return [one for one in others if _tokenization(one.format) == _tokenization(known.format)] if others else []

    def names_of(self, tag: str) -> frozenset[str]:
        """Return the model names of one format; empty for an unknown tag."""
        known = self._known.get(tag)
        return frozenset(known.format.model_names) if known is not None else frozenset()

    def is_name_partial(self, name: str) -> bool:
        """Return whether only some formats have this model name, as while a rollout renames the model."""
        return 0 < self._formats_by_name[name] < len(self._known)

    def model_names(self) -> list[str]:
        """Return all served model names, sorted."""
        return sorted(self._formats_by_name)

    def has_model(self, name: str) -> bool:
        """Return whether some worker's model has this name."""
        return name in self._formats_by_name

    def describe(self, name: str) -> dict[str, Any]:
        """Return the fields of vLLM's model objects for a name. `max_model_len` is its workers' smallest, which all of them accept."""
        serving = [known.format for known in self._known.values() if name in known.format.model_names]
        known = self.of_model(name)
        if not serving and known is not None:
            serving = [known.format]  # --served-model-name: only the router knows this name
        root = known.format.model_uri if known is not None else ""
        return {"root": root or name, "parent": None, "max_model_len": min((one.max_model_len for one in serving), default=None)}


def _tokenization(format: PromptFormat) -> tuple[object, ...]:
    """Return what determines the tokens of a prompt."""
    names = sorted(format.model_names)
    return format.tokenizer_digest, format.chat_template, format.tool_template, format.special_tokens, names


def _tag(head: Head) -> str:
    return (head.get(b"etag") or b"").decode("latin-1")


def _read(tag: str, body: bytes, is_gzip: bool, cache: TokenCache) -> KnownFormat:
    if is_gzip:
        decompressor = zlib.decompressobj(wbits=31)
        body = decompressor.decompress(body, MAX_BYTES)
        if not decompressor.eof:
            raise ValueError(f"its gzip form is cut off, or holds more than {MAX_BYTES >> 20} MiB")
    encoder = PromptEncoder(msgspec.json.decode(body, type=PromptFormat), cache)
    return KnownFormat(tag, encoder, prompt_root(encoder.format))
