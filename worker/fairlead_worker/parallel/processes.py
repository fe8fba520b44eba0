"""The rank processes of this node: it starts them, sends them each step and waits for their end. None outlives this process.

Each process reads its standard input, which ends when this process ends for any reason; then the rank ends too.
"""

import functools
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from fairlead_worker.parallel.links import send_unless_ended
from fairlead_worker.parallel.messages import Join, RankFailed
from fairlead_worker.platform.processes import describe_exit

logger = logging.getLogger(__name__)

REASON_SECONDS = 0.5
"""How long a rank's own reason may take to arrive after its process has ended."""


class Processes:
    """The processes, used by one thread. Other threads wait for each process, and call `on_loss(reason)` when it ends."""

    def __init__(
        self,
        ranks: Iterable[int],
        size: int,
        config: dict[str, object],
        on_loss: Callable[[str], None],
        *,
        meeting: str = "",
        first: int = 0,
        parent: str | None = None,
    ) -> None:
        """Start `ranks` of `size`. They import immediately, and load on request.

        `first`: the rank that has this node's first GPU. `parent`: the folder in which they get their own folder.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="ranks-", dir=parent))  # mode 0700: other users cannot connect to the sockets
        self._size, self._config, self._on_loss, self._meeting, self._first = size, config, on_loss, meeting, first
        self._context = zmq.Context()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._reasons: dict[int, str] = {}
        self._changed = threading.Condition()
        incoming = self._context.socket(zmq.PULL)
        incoming.bind(f"ipc://{self.directory / 'from'}")
        threading.Thread(target=self._receive_reasons, args=(incoming,), name="rank failures", daemon=True).start()
        self._processes = {rank: self._start(rank) for rank in ranks}
        for rank, process in self._processes.items():
            threading.Thread(target=self._wait_for_end, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    @property
    def any_ended(self) -> bool:
        return any(map(_has_ended, self._processes.values()))

    def send(self, data: bytes) -> None:
        """Send to all processes. Wait for those that have not connected yet, and skip those that have ended."""
        for rank, process in self._processes.items():
            send_unless_ended(self._sockets[rank], [data], functools.partial(_has_ended, process))

    def wait(self, grace: float) -> None:
        """Wait until all have ended; kill the rest after `grace` seconds."""
        deadline = time.monotonic() + grace
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self) -> None:
        """Kill all processes immediately, from any thread."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{self.directory / str(rank)}")
        self._sockets[rank] = socket
        process = subprocess.Popen([sys.executable, "-m", "fairlead_worker.parallel.follower"], stdin=subprocess.PIPE, bufsize=0)
        assert process.stdin is not None
        join = Join(str(self.directory), rank, self._size, self._config, rank - self._first, self._meeting)
        with suppress(BrokenPipeError):  # it has ended already, and its waiting thread reports it
            process.stdin.write(msgspec.json.encode(join) + b"\n")
        return process

    def _wait_for_end(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        """Wait for the rank's end, on a thread of its own, and report it."""
        status = process.wait()
        with self._changed:
            self._changed.wait_for(lambda: rank in self._reasons, REASON_SECONDS if status else 0.0)
        name = f"rank {rank} of {self._size}"
        reason = self._reasons.get(rank)
        self._on_loss(f"{name}: {reason}" if reason else describe_exit(name, status))

    def _receive_reasons(self, socket: "zmq.Socket[bytes]") -> None:
        while True:
            failed = msgspec.msgpack.decode(socket.recv(), type=RankFailed)
            with self._changed:
                self._reasons[failed.rank] = failed.reason
                self._changed.notify_all()


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    return process.poll() is not None
