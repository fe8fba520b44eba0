"""Where a local run keeps its files, and how `fairlead status` finds it.

`<tmp>/fairlead-<uid>/<service>-<random>/`, mode 0700: `run.json`, `logs/`, `endpoints/`, `redis.sock`, `tmp/` of the pods.
A run that ended well removes its directory.
"""

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fairlead.errors import UserError


@dataclass(frozen=True)
class RunRecord:
    """What others may know of a run. `urls`: service name → base URL of its router."""

    pid: int
    manifest: str
    urls: Mapping[str, str]


def runs_root() -> Path:
    """The directory of this user's runs; UserError when somebody else made it."""
    root = Path(tempfile.gettempdir()) / f"fairlead-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{root} is not a directory of yours alone (mode 0700): remove it, or set TMPDIR")
    return root


def make_run_directory(name: str) -> Path:
    """A new, private one. The name is short because unix sockets lie below, whose paths have at most 107 bytes (macOS: 103)."""
    directory = Path(tempfile.mkdtemp(prefix=f"{name[:12]}-", dir=runs_root()))
    for part in ("logs", "endpoints", "tmp"):
        (directory / part).mkdir(mode=0o700)
    return directory


def write_record(directory: Path, record: RunRecord) -> None:
    fresh = directory / ".run.json"
    fresh.write_text(json.dumps(asdict(record)))
    fresh.replace(directory / "run.json")


def running() -> list[RunRecord]:
    """The runs whose process is alive."""
    records = []
    for file in sorted(runs_root().glob("*/run.json")):
        try:
            record = RunRecord(**json.loads(file.read_text()))
            os.kill(record.pid, 0)
        except (OSError, ValueError, TypeError):
            continue
        records.append(record)
    return records
