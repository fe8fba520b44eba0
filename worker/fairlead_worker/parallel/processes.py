"""The rank processes of this node: it starts them, sends them each step and waits for their end. None outlives this process.

Each process reads its standard input, which ends when this process ends for any reason; then the rank ends too.
"""

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

from fairlead_worker.parallel.messages import Join, RankFailed
from fairlead_worker.platform.processes import describe_exit

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 0.5
"""How long a rank's own reason may take to arrive after its process has ended."""


class Processes:
    """The processes, used by one thread. Other threads wait for each process, and call `lost(reason)` when it ends."""

    def __init__(
        self,
        ranks: Iterable[int],
        size: int,
        config: dict[str, object],
        lost: Callable[[str], None],
        *,
        meeting: str = "",
        first: int = 0,
        parent: str | None = None,
    ) -> None:
        """Start `ranks` of `size`. They import immediately, and load on request.

        `first`: the rank that has this node's first GPU. `parent`: the folder in which they get their own folder.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="ranks-", dir=parent))  # mode 0700: other users cannot connect to the sockets
        self._size, self._config, self._lost, self._meeting, self._first = size, config, lost, meeting, first
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._words: dict[int, str] = {}
        self._heard = threading.Condition()
        incoming = self._context.socket(zmq.PULL)
        incoming.bind(f"ipc://{self.directory / 'from'}")
        threading.Thread(target=self._listen, args=(incoming,), name="last words", daemon=True).start()
        self._processes = {rank: self._start(rank) for rank in ranks}
        for rank, process in self._processes.items():
            threading.Thread(target=self._await, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    @property
    def any_ended(self) -> bool:
        return any(process.poll() is not None for process in self._processes.values())

    def tell(self, data: bytes) -> None:
        """Send to all processes; never blocks."""
        for socket in self._sockets:
            socket.send(data)

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
        self._sockets.append(socket)
        process = subprocess.Popen([sys.executable, "-m", "fairlead_worker.parallel.follower"], stdin=subprocess.PIPE, bufsize=0)
        assert process.stdin is not None
        join = Join(str(self.directory), rank, self._size, self._config, rank - self._first, self._meeting)
        with suppress(BrokenPipeError):  # it has ended already, and its waiting thread reports it
            process.stdin.write(msgspec.json.encode(join) + b"\n")
        return process

    def _await(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        """Wait for the rank's end, on a thread of its own, and report it."""
        status = process.wait()
        with self._heard:
            self._heard.wait_for(lambda: rank in self._words, LAST_WORDS_SECONDS if status else 0.0)
        name = f"rank {rank} of {self._size}"
        words = self._words.get(rank)
        self._lost(f"{name}: {words}" if words else describe_exit(name, status))

    def _listen(self, socket: "zmq.Socket[bytes]") -> None:
        while True:
            words = msgspec.msgpack.decode(socket.recv(), type=RankFailed)
            with self._heard:
                self._words[words.rank] = words.reason
                self._heard.notify_all()
