"""Where a local run keeps its files, and how `fairlead status` finds it.

`<tmp>/fairlead-<uid>/<service>-<random>/`, mode 0700: `run.json`, `batch-secret`, `logs/`, `endpoints/`, `redis.sock`, `tmp/` of the pods.
A run that ends without error removes its directory. After a failure or a kill the directory stays for a day, for its logs.
"""

import asyncio
import json
import logging
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypedDict

from fairlead.errors import UserError

logger = logging.getLogger(__name__)
REMOVE_SECONDS = 5.0
"""Time for the last processes of a run to stop writing: a worker's engine has its own session and ends shortly after the worker."""
BATCH_SECRET = "batch-secret"
"""File that replaces the Secret which routers and batch servers share. Only this user can enter the directory."""


class PodRecord(TypedDict):
    """The state of a pod. `log`: path of its log."""

    name: str
    service: str
    component: str
    phase: str
    reason: str
    percent: int | None
    ready: bool
    restarts: int
    address: str
    log: str


@dataclass(frozen=True)
class RunRecord:
    """What `fairlead status` reads about a run. Mappings are by service name."""

    pid: int
    command: str
    """What the user ran, to be quoted in messages."""
    urls: Mapping[str, str]
    """Base URL of the router, or of the only worker."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """Wanted workers."""
    pods: Sequence[PodRecord] = ()
    models: Mapping[str, str] = field(default_factory=dict)
    """The model's name in the API."""
    calls: Mapping[str, str] = field(default_factory=dict)
    """A command that sends a request."""
    manifest: str = ""
    """The file that the run follows; empty for `fairlead serve`."""
    has_router: bool = True
    secret_file: str = ""
    """File with a key that the run's admin paths accept: the secret of its routers, or the worker's API keys; empty: they need none."""

    @property
    def credential(self) -> dict[str, str]:
        """Return the headers with which this machine's user reads the admin paths of the run; none if the file cannot be read."""
        try:
            lines = Path(self.secret_file).read_text().splitlines() if self.secret_file else []
        except OSError:
            return {}
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        return {"authorization": f"Bearer {keys[0]}"} if keys else {}

    def pods_of(self, service: str) -> list[PodRecord]:
        return [pod for pod in self.pods if pod["service"] == service]


def runs_root() -> Path:
    """Return the directory of this user's runs. Raises UserError if another user owns it or can write to it."""
    root = Path(tempfile.gettempdir()) / f"fairlead-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{root} is not a directory that only you can use (mode 0700): remove it, or set TMPDIR to another directory")
    return root


def remove_old_runs(keep_seconds: float = 86_400) -> None:
    """Remove the directories of ended runs that are older than `keep_seconds`."""
    for directory in runs_root().iterdir():
        if directory.lstat().st_mtime < time.time() - keep_seconds and not _alive(directory):
            shutil.rmtree(directory, ignore_errors=True)


def make_run_directory(name: str) -> Path:
    """Create a private directory. Its name is short: it contains unix sockets, whose paths have at most 107 bytes (macOS: 103)."""
    directory = Path(tempfile.mkdtemp(prefix=f"{name[:12]}-", dir=runs_root()))
    for part in ("logs", "endpoints", "tmp"):
        (directory / part).mkdir(mode=0o700)
    (directory / BATCH_SECRET).write_text(secrets.token_hex(32))
    return directory


async def remove_run_directory(directory: Path) -> None:
    """Remove a run's directory. Repeat that while an ending process still writes to it, and log what is left after `REMOVE_SECONDS`."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while True:
        problem: OSError | None = None
        try:
            shutil.rmtree(directory)
        except FileNotFoundError as error:  # the directory, or a file that a process removed meanwhile
            problem = error if directory.exists() else None
        except OSError as error:
            problem = error
        if problem is None:
            return
        if time.monotonic() > deadline:
            logger.warning("%s is left, remove it: %s", directory, problem)
            return
        await asyncio.sleep(0.05)


def write_record(directory: Path, record: RunRecord) -> None:
    fresh = directory / ".run.json"
    fresh.write_text(json.dumps(asdict(record)))
    fresh.replace(directory / "run.json")


def running() -> list[RunRecord]:
    """Return the runs whose process is alive."""
    return [record for directory in sorted(runs_root().iterdir()) if (record := _alive(directory))]


def _alive(directory: Path) -> RunRecord | None:
    try:
        record = RunRecord(**json.loads((directory / "run.json").read_text()))
        os.kill(record.pid, 0)
    except (OSError, ValueError, TypeError):
        return None
    return record
