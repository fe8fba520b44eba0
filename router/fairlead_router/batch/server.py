"""The process: storage, runner and HTTP server, from start to SIGTERM."""

import asyncio
import logging
import signal
import socket
import time
from pathlib import Path
from urllib.parse import unquote

from aiohttp import web

from fairlead_common.http.aiohttp_runner import Runner as HttpRunner
from fairlead_router.batch.app import BatchApp
from fairlead_router.batch.config import BatchConfig
from fairlead_router.batch.line_client import LineClient
from fairlead_router.batch.metrics import BatchMetrics
from fairlead_router.batch.pacing import ConcurrencyLimit, Slots
from fairlead_router.batch.router_certificate import RouterCertificate
from fairlead_router.batch.runner import Runner
from fairlead_router.batch.storage.base import Storage, StorageConflict, StorageError
from fairlead_router.batch.store import Store
from fairlead_router.errors import ListenError
from fairlead_router.tenancy.shared_secret import SharedSecret

logger = logging.getLogger(__name__)

CLEAN_SECONDS = 60.0
"""Interval between removals of expired files and batches."""
SHUTDOWN_SECONDS = 5.0


async def serve(config: BatchConfig) -> None:
    """Serve until SIGTERM. Nothing must be finished first: unfinished lines run again. Raises StorageError, ListenError."""
    stop, conflict = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def on_conflict() -> None:
        conflict.set()
        stop.set()

    secret, metrics = SharedSecret(config.secret_file), BatchMetrics()
    limit = ConcurrencyLimit(config.max_concurrency)
    metrics.concurrency.set_function(lambda: limit.limit)
    store = Store(create_storage(config.storage))
    await store.load()
    slots = Slots(limit)
    certificate = RouterCertificate(config.router_certfile) if config.router_certfile else None
    async with LineClient(config.router_url, secret, certificate) as client:
        runner = Runner(store, client, slots, metrics, on_conflict)
        app = BatchApp(store, runner, secret, metrics, on_conflict).create()
        http = HttpRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
        await http.setup()
        cleaning = asyncio.create_task(_clean(store))
        try:
            try:
                site = _create_site(http, config.host, config.port)
                await site.start()
            except OSError as error:
                raise ListenError(f"--host {config.host} --port {config.port}: {error}") from error
            logger.info("running on %s", site.name)
            for batch in store.unfinished():
                runner.start(batch.id)
            await stop.wait()
        finally:
            cleaning.cancel()
            await runner.close()
            slots.close()
            await http.cleanup()
    if conflict.is_set():
        raise StorageConflict(f"{config.storage}: another process writes to it")


def _create_site(http: HttpRunner, host: str, port: int) -> web.BaseSite:
    if host == "0.0.0.0" and socket.has_dualstack_ipv6():  # IPv6 too: a pod in an IPv6 cluster has no IPv4 address
        return web.SockSite(http, socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True))
    return web.TCPSite(http, host, port)


async def _clean(store: Store) -> None:
    while True:
        try:
            await store.remove_expired(time.time())
        except StorageError as error:
            logger.warning("expired files stay for now: %s", error)
        await asyncio.sleep(CLEAN_SECONDS)


def create_storage(uri: str) -> Storage:
    """Return the storage of `file:///FOLDER` or `s3://BUCKET[/FOLDER]`."""
    if uri.startswith("file://"):
        from fairlead_router.batch.storage.folder import Folder

        return Folder(Path(unquote(uri.removeprefix("file://"))))
    from fairlead_router.batch.storage.bucket import Bucket  # imported late: its library takes 20 MB

    bucket, _, folder = uri.removeprefix("s3://").partition("/")
    return Bucket(bucket, folder.strip("/"))
