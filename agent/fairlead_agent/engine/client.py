"""The engine's HTTP server, as the agent asks it."""

from typing import Any

import aiohttp
import msgspec
from yarl import URL

from fairlead_agent.config import AgentConfig
from fairlead_agent.engine.body_fields import read_body_fields
from fairlead_agent.engine.metrics import EngineStats, read_stats
from fairlead_agent.engine.tokenizer import TokenDifference, samples
from fairlead_common.prompts.encoder import PromptFormat

KEEP_ALIVE_SECONDS = 3.0
"""Shorter than vLLM keeps an idle connection (5 s): a server that closes first races with a new request."""


class EngineGone(Exception):
    """The engine refuses connections: it has not started yet, or it has ended."""


class EngineSilent(Exception):
    """The engine did not answer in time, or not as expected."""


class EngineUnusable(Exception):
    """The agent can never work with this engine as both are set."""


class Model(msgspec.Struct, frozen=True):
    """One model or LoRA adapter in the engine's `/v1/models`."""

    id: str
    root: str | None = None
    parent: str | None = None
    """The model that the adapter belongs to; None: it is no adapter."""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Model]


class EngineClient:
    """Asks the engine. Construct it in the event loop."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),  # the requests are of many clients
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        )

    async def close(self) -> None:
        await self.session.close()

    def url(self, raw_path: str) -> URL:
        return URL(self.config.engine_url + raw_path, encoded=True)

    async def fetch(self, path: str, body: Any = None, timeout: float = 2.0) -> tuple[int, bytes]:
        """Return status and body. Raises EngineGone, EngineSilent."""
        data = None if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"} if data is not None else None
        try:
            async with self.session.request(
                "GET" if data is None else "POST", self.url(path), data=data, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout)
            ) as response:
                return response.status, await response.read()
        except TimeoutError as error:
            raise EngineSilent(f"no answer to {path} within {timeout:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise EngineGone(f"{self.config.runtime_name} at {self.config.engine_url} refuses connections") from error
        except aiohttp.ClientError as error:
            raise EngineSilent(f"{path}: {error}") from error

    async def is_healthy(self) -> bool:
        """Return whether the engine serves. Raises EngineGone, EngineSilent."""
        status, _ = await self.fetch("/health")
        return status == 200

    async def stats(self) -> tuple[EngineStats, bytes]:
        """Return the load and the exposition. Raises EngineGone, EngineSilent."""
        status, text = await self.fetch("/metrics")
        if status != 200:
            raise EngineSilent(f"/metrics answers {status}" + (": start SGLang with --enable-metrics" if status == 404 else ""))
        return read_stats(text, self.config.runtime), text

    async def models(self) -> list[Model]:
        """Return the models and adapters. Raises EngineGone, EngineSilent, EngineUnusable."""
        status, body = await self.fetch("/v1/models")
        if status == 401:
            raise EngineUnusable(
                f"{self.config.runtime_name} asks for an API key, and the routers' requests have none: start it without --api-key"
                + (" and without VLLM_API_KEY in its environment" if self.config.runtime == "vllm" else "")
            )
        try:
            return msgspec.json.decode(body, type=_Models).data
        except msgspec.MsgspecError as error:
            raise EngineSilent(f"/v1/models answers {status}: {error}") from error

    async def body_fields(self) -> dict[str, frozenset[str]]:
        """Return the fields of the engine's JSON bodies by path, from its OpenAPI document; empty without one. Raises EngineGone."""
        try:
            status, body = await self.fetch("/openapi.json", timeout=30.0)
            return read_body_fields(msgspec.json.decode(body)) if status == 200 else {}
        except (EngineSilent, msgspec.MsgspecError):
            return {}

    async def block_size(self, stats: EngineStats) -> int:
        """Return the tokens of a KV block; 0: unknown. Raises EngineGone, EngineSilent."""
        if stats.block_size or self.config.runtime != "sglang":
            return stats.block_size
        status, body = await self.fetch("/get_server_info")
        if status != 200:
            return 0
        try:
            size = msgspec.json.decode(body, type=dict[str, Any]).get("page_size")
        except msgspec.MsgspecError:
            return 0
        return size if isinstance(size, int) else 0

    async def find_difference(self, format: PromptFormat) -> TokenDifference | None:
        """Return the first sample that the engine tokenizes differently. Raises EngineGone, EngineSilent, NoFormat.

        An engine without `/tokenize`, and one whose template refuses a sample, cannot be compared: the files count.
        """
        for body, what, ours in samples(format):
            status, answer = await self.fetch("/tokenize", body, timeout=30.0)
            if status != 200:
                continue
            try:
                theirs = msgspec.json.decode(answer, type=dict[str, Any])["tokens"]
            except (msgspec.MsgspecError, KeyError) as error:
                raise EngineSilent(f"/tokenize: {error}") from error
            if theirs != ours:
                return TokenDifference(what, ours, theirs)
        return None
