"""File with the canary's revision and weight, reloaded while the router runs: a new weight needs no restart."""

import logging
from pathlib import Path

import msgspec

from fairlead_common.canary_split import Split
from fairlead_router.file_follower import FileFollower

logger = logging.getLogger(__name__)


class CanaryFile:
    """`split` is the newest valid version of the file. Without a file, canaries get requests only if no other worker is left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = FileFollower(lambda: msgspec.json.decode(path.read_bytes(), type=Split), path)
        self.split = Split()
        self.problem = ""
        """Problem of the newest version; empty when that version is in use."""
        self.reload()

    def reload(self) -> None:
        """Read the file if it has changed."""
        try:
            split = self._file.poll()
        except FileNotFoundError:
            split = Split()
        except OSError as error:
            self._report_problem(error.strerror or type(error).__name__)
            return
        except msgspec.MsgspecError as error:
            self._report_problem(str(error))
            return
        if split is None:
            return
        self.problem = ""
        if split != self.split:
            logger.info("split: %s", f"{split.weight} % for the canary {split.revision}" if split.revision else "no canary")
        self.split = split

    def _report_problem(self, why: str) -> None:
        if why != self.problem:
            logger.error("split file %s cannot be used; the previous version stays in use: %s", self._path, why)
        self.problem = why
