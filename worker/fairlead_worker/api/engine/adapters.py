"""LoRA adapters by the names that requests use. They are loaded and unloaded while the worker serves."""

import asyncio
import itertools
import logging
import re
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairlead_common.truncate import quote, truncate
from fairlead_worker.api.engine.client import EngineClient, EngineGone
from fairlead_worker.api.errors import ApiError, invalid
from fairlead_worker.config import ADAPTER_NAME, WorkerConfig
from fairlead_worker.errors import AdapterError
from fairlead_worker.ipc.messages import AdapterInfo, FetchAdapter, LoadAdapter, UnloadAdapter
from fairlead_worker.weights.cache import ModelCache

logger = logging.getLogger(__name__)
LOAD_TIMEOUT_SECONDS = 300.0
"""Timeout of a load request: half of the time that OpenAI's clients wait for a response."""


@dataclass(slots=True, eq=False)
class Adapter:
    """A loaded adapter and its number of running requests."""

    info: AdapterInfo
    loaded_at: int = field(default_factory=lambda: int(time.time()))
    requests: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no request uses the adapter. It is read only after the adapter has lost its name."""


class Adapters:
    """Adapters by name. Changes run one at a time while requests continue."""

    def __init__(self, config: WorkerConfig, engine: EngineClient) -> None:
        self._config, self._engine = config, engine
        self._cache = ModelCache(Path(config.model_cache), config.pod) if config.model_cache else None
        self._by_name: dict[str, Adapter] = {}
        self._change_lock = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        """Loads, and unloads that wait for running requests: the event loop itself keeps no reference."""

    def set_initial(self, infos: tuple[AdapterInfo, ...]) -> None:
        """Register the adapters that the engine loaded at start-up."""
        self._by_name = {info.name: Adapter(info) for info in infos}
        self._numbers = itertools.count(1 + max((info.number for info in infos), default=0))

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._by_name.values()))

    @contextmanager
    def use(self, model: str) -> Iterator[AdapterInfo | None]:
        """Hold the adapter of this name until the context ends. Yield None for the model's own name. Raise ApiError 404 after an unload."""
        adapter = self._by_name.get(model)
        if adapter is None:
            if model not in self._config.names:
                raise ApiError(404, f"the LoRA adapter {quote(model)} was unloaded", param="model", code="model_not_found")
            yield None
            return
        adapter.requests += 1
        try:
            yield adapter.info
        finally:
            adapter.requests -= 1
            if not adapter.requests:
                adapter.idle.set()

    async def load(self, name: str, uri: str, in_place: bool) -> None:
        """Fetch and load an adapter. With `in_place`, replace the adapter of that name; its running requests finish with the old one.

        Raises ApiError 504 after LOAD_TIMEOUT_SECONDS. The load continues then: a slow download may still succeed, and half a download is
        useless.
        """
        loading = self._start(self._load(name, uri, in_place), f"load {name}")
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_SECONDS):
                await asyncio.shield(loading)
        except (TimeoutError, asyncio.CancelledError) as interrupted:
            if not loading.done():
                loading.add_done_callback(_log_load_result)
            if loading.done() or isinstance(interrupted, asyncio.CancelledError):
                raise
            message = (
                f"LoRA adapter {quote(name)} is not loaded after {LOAD_TIMEOUT_SECONDS:.0f} s. It continues to load: see GET /v1/models"
            )
            raise ApiError(504, message, type="server_error", code="timeout") from None

    async def _load(self, name: str, uri: str, in_place: bool) -> None:
        if not re.fullmatch(ADAPTER_NAME, name):
            raise invalid("lora_name: must be letters, digits and ._:/-, at most 253, a letter or digit first", param="lora_name")
        if name in self._config.names:
            raise invalid(f"lora_name: {quote(name)} is the model's own name; give the adapter another", param="lora_name")
        self._check_name(name, in_place)
        number = next(self._numbers)
        try:  # Outside the lock: a hub that does not answer must not block other adapters.
            folder = await self._fetch(number, name, uri)
        except AdapterError as error:
            message = f"lora_path: {truncate(error)}"
            if await asyncio.to_thread(_is_missing, uri):
                raise ApiError(404, message, param="lora_path", code="not_found") from error
            raise invalid(message, param="lora_path") from error
        async with self._change_lock:
            old = self._check_name(name, in_place)
            changed = await self._engine.change_adapter(LoadAdapter(number, name, uri, str(folder)))
            if changed.info is None:
                raise invalid(
                    f"lora_path: cannot load LoRA adapter {quote(name)} from {quote(uri)}: {truncate(changed.error)}", param="lora_path"
                )
            self._by_name[name] = Adapter(changed.info)
            logger.info("LoRA adapter %s loaded from %s", name, uri)
        if old is not None:
            self._retire(old)

    async def _fetch(self, number: int, name: str, uri: str) -> Path:
        """Return the adapter's folder once all nodes of the model have it. Raise AdapterError."""
        local = asyncio.to_thread(self._folder, name, uri)
        if self._config.nnodes == 1:
            return await local
        folder, remote = await asyncio.gather(local, self._engine.change_adapter(FetchAdapter(number, name, uri)))
        if remote.error:
            raise AdapterError(name, uri, remote.error)
        return folder

    def _folder(self, name: str, uri: str) -> Path:
        """Return the adapter's folder. Raise AdapterError. The download code is imported on first use, because it added 0.2 s to each
        start."""
        from fairlead_worker.lora.source import warm_folder

        return warm_folder(name, uri, self._cache)

    def _check_name(self, name: str, in_place: bool) -> Adapter | None:
        """Return the adapter that is replaced, or None. Raise ApiError 400 if the name is taken."""
        old = self._by_name.get(name)
        if old is not None and not in_place:
            raise invalid(f"lora_name: {quote(name)} is loaded already; unload it first, or set load_inplace", param="lora_name")
        return old

    async def unload(self, name: str) -> None:
        """Accept no new requests for an adapter, and unload it in the background after its running ones. Raise ApiError 404."""
        async with self._change_lock:
            adapter = self._by_name.pop(name, None)
        if adapter is None:
            raise ApiError(404, f"lora_name: there is no LoRA adapter {quote(name)} here", param="lora_name", code="model_not_found")
        self._retire(adapter)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the adapters for routers, which need them for routing and block hashes."""
        parent = self._config.names[0]
        return {name: {"digest": one.info.digest, "root": one.info.uri, "parent": parent} for name, one in self._by_name.items()}

    def _retire(self, adapter: Adapter) -> None:
        self._start(self._unload_when_idle(adapter), f"unload {adapter.info.name}")

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _unload_when_idle(self, adapter: Adapter) -> None:
        while adapter.requests:
            adapter.idle.clear()
            await adapter.idle.wait()
        try:
            await self._engine.change_adapter(UnloadAdapter(adapter.info.number))
        except EngineGone:  # the adapter ended with it
            return
        logger.info("LoRA adapter %s unloaded", adapter.info.name)


def _is_missing(uri: str) -> bool:
    """Return whether a local path does not exist. vLLM answers 404 for it."""
    local = uri.startswith("file://") or "://" not in uri
    return local and not Path(uri.removeprefix("file://")).exists()


def _log_load_result(loading: "asyncio.Task[None]") -> None:
    """Log the failure of a load that no request waits for any more."""
    if not loading.cancelled() and (error := loading.exception()) is not None:
        logger.warning("%s: %s", loading.get_name(), error)
