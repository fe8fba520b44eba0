"""Rank 0's hold on the other ranks: it starts them, tells them each step, hears of their end, and leaves none behind.

Each hangs on its standard input: when this process ends, however it ends, so do they. When one of them ends before it should, this process
ends too, with the reason as its own: a model of which a part is missing computes nothing, and a collective may wait for that part for ever.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import zmq

from fairlead_worker.ending import ending
from fairlead_worker.engine.loop import Outbox
from fairlead_worker.messages import Failed
from fairlead_worker.parallel.messages import End, Join, LastWords, ToRank

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 0.5
"""How long a rank's own reason may take to arrive after its process has ended, and ours to leave before this process does."""
FOLLOWS_SECONDS = 2.0
"""How long the end of a process may take to show after something that was done together has failed."""
GRACE_SECONDS = 3.0
"""After which a rank that was told to end is killed."""


class Ranks:
    """The ranks from 1 on. For one thread; others of its own wait for the processes."""

    def __init__(self, size: int, config: dict[str, object], outbox: Outbox, parent: str | None = None) -> None:
        """Starts them: they import at once, and load when they are told to. `parent`: the folder in which they get one of their own."""
        self.size = size
        self.directory = Path(tempfile.mkdtemp(prefix="ranks-", dir=parent))  # mode 0700: nobody else can speak to them
        self._outbox = outbox
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._ending = threading.Lock()
        """Held by whoever decides how this ends, to the end: `close`, or the thread of the first rank that is lost."""
        self._words: dict[int, str] = {}
        self._heard = threading.Condition()
        incoming = self._context.socket(zmq.PULL)
        incoming.bind(f"ipc://{self.directory / 'from'}")
        threading.Thread(target=self._listen, args=(incoming,), name="last words", daemon=True).start()
        self._processes = [self._start(Join(str(self.directory), rank, size, config)) for rank in range(1, size)]
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._await, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    @property
    def store(self) -> Path:
        """The file through which the ranks meet."""
        return store(self.directory)

    def tell(self, message: ToRank) -> None:
        """To all of them; never waits."""
        data = self._encoder.encode(message)
        for socket in self._sockets:
            socket.send(data)

    @contextmanager
    def together(self) -> Iterator[None]:
        """For what is done together with the others. Where one of them has ended, that ends this process, and is the reason."""
        try:
            yield
        except Exception:
            deadline = time.monotonic() + FOLLOWS_SECONDS
            while time.monotonic() < deadline:
                if any(process.poll() is not None for process in self._processes):
                    time.sleep(10 * LAST_WORDS_SECONDS)  # the thread that has waited for it ends this process meanwhile
                time.sleep(0.01)
            raise

    def close(self, grace: float = GRACE_SECONDS) -> None:
        """Ends them, after `grace` seconds by force. Returns when none is left."""
        with self._ending:
            self.tell(End())
            deadline = time.monotonic() + grace
            for process in self._processes:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, join: Join) -> "subprocess.Popen[bytes]":
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{self.directory / str(join.rank)}")
        self._sockets.append(socket)
        process = subprocess.Popen([sys.executable, "-m", "fairlead_worker.parallel.follower"], stdin=subprocess.PIPE, bufsize=0)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, and whoever waits for it says so
            process.stdin.write(msgspec.json.encode(join) + b"\n")
        return process

    def _await(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        """On a thread of its own: until the rank's end, and of what follows from that."""
        status = process.wait()
        if not self._ending.acquire(blocking=False):
            return  # it was told to, or another one was lost before
        with self._heard:
            self._heard.wait_for(lambda: rank in self._words, LAST_WORDS_SECONDS)
        name = f"rank {rank} of {self.size}"
        words = self._words.get(rank)
        reason = f"{name}: {words}" if words else ending(name, status)
        logger.error("%s", reason)
        self._outbox.send(Failed(reason=reason))
        for other in self._processes:
            if other.poll() is None:
                other.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
        time.sleep(LAST_WORDS_SECONDS)  # the main thread may hang in a collective: nobody could close its socket
        logging.shutdown()
        os._exit(1)

    def _listen(self, socket: "zmq.Socket[bytes]") -> None:
        while True:
            words = msgspec.msgpack.decode(socket.recv(), type=LastWords)
            with self._heard:
                self._words[words.rank] = words.reason
                self._heard.notify_all()


def store(directory: Path) -> Path:
    """The file through which ranks meet, of the folder that they share."""
    return directory / "store"
