"""`fairlead-operator` as processes that are forked from one which has imported it: a start takes no second of a core."""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fairlead_operator.main import main

_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["pytest", "fairlead_operator.main"])
_LOOK = threading.Lock()  # multiprocessing looks after all of its children at each start, and an exit code can be read once only


class ForkedOperator:
    """One operator, as subprocess.Popen would have it. May be used from any thread."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._process = _FORKING.Process(target=_operate, args=(list(arguments), log, dict(environment)), daemon=True)
        with _LOOK:
            self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def poll(self) -> int | None:
        """Its exit code (of a signal: negative); None while it runs."""
        with _LOOK:
            return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float = 30.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, f"process {self.pid} has not ended after {timeout} s"
            time.sleep(0.01)
        return code


def _operate(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    with log.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["fairlead-operator", *arguments]
    main()
