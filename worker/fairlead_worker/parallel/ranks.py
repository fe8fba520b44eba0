"""Rank 0's control of the other ranks, on its own node and on others: it sends each step and watches for failures.

If a rank ends early, this process ends too, with the same reason: an incomplete model computes nothing, and a collective may wait for
the missing rank for ever.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fairlead_worker.config import WorkerConfig
from fairlead_worker.engine.loop import EngineEnd
from fairlead_worker.ipc.messages import Failed, FetchAdapter
from fairlead_worker.parallel.messages import AdapterFetched, End, LoadModel, ToRank
from fairlead_worker.parallel.nodes import Nodes
from fairlead_worker.parallel.processes import REASON_SECONDS, Processes

if TYPE_CHECKING:
    from fairlead_worker.sharding.group import Group

logger = logging.getLogger(__name__)

FOLLOWS_SECONDS = 2.0
"""How long the end of a process may take to show after a collective operation has failed."""
GRACE_SECONDS = 3.0
"""Seconds after which a rank that was told to end is killed."""


class Ranks:
    """The ranks from 1 on, used by one thread. Other threads wait for processes and nodes."""

    def __init__(self, config: WorkerConfig, outbox: EngineEnd, parent: str | None = None) -> None:
        """Start the ranks of this node. Raises OSError if other nodes cannot connect. `parent`: as in `Processes`."""
        self.size = config.tensor_parallel_size
        self._outbox = outbox
        self._encoder = msgspec.msgpack.Encoder()
        self._ending = threading.Lock()
        """Acquired once and never released, by the side that decides how this process ends: `close`, or the thread of the first lost rank
        or node."""
        self._nodes = Nodes(config, outbox, self._on_loss) if config.nnodes > 1 else None
        meeting = "" if self._nodes is None else self._nodes.meeting
        others = range(1, config.local_ranks)
        self._processes = Processes(others, self.size, config.model_dump(), self._on_loss, meeting=meeting, parent=parent)

    def join(self) -> "Group":
        """Join the other ranks after all nodes are present; wait as long as it takes."""
        from fairlead_worker.sharding.group import Group
        from fairlead_worker.sharding.rendezvous import file_store

        if self._nodes is None:
            return Group.join(file_store(self._processes.directory), 0, self.size)
        self._nodes.wait()
        return Group.join(self._nodes.store(self.size), 0, self.size)

    def send(self, message: ToRank) -> None:
        """Send to all ranks. Skip those that have ended: another thread ends this process for each of them."""
        data = self._encoder.encode(message)
        if self._nodes is not None:
            self._nodes.send(data)
        self._processes.send(data)

    def load(self, folder: Path) -> None:
        """Send the folder of the model's files to the ranks of this node; other nodes locate the files themselves."""
        self._processes.send(self._encoder.encode(LoadModel(str(folder.absolute()))))

    def fetched(self, number: int, folder: Path) -> None:
        """Send the folder of an adapter's files to the ranks of this node."""
        self._processes.send(self._encoder.encode(AdapterFetched(number, str(folder.absolute()))))

    def fetch(self, wanted: FetchAdapter) -> None:
        """Let the other nodes download an adapter's files. The result is sent separately."""
        assert self._nodes is not None, "only a model over several nodes fetches"
        self._nodes.fetch(wanted)

    def loaded(self) -> None:
        """Record that rank 0 has loaded its part: from now on the progress of the others is reported."""
        if self._nodes is not None:
            self._nodes.report = True

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Run a collective operation. If another rank has ended, this process ends with that rank's reason."""
        try:
            yield
        except Exception:
            deadline = time.monotonic() + FOLLOWS_SECONDS * (1 if self._nodes is None else 2)
            while time.monotonic() < deadline:
                if self._processes.any_ended:
                    time.sleep(10 * REASON_SECONDS)  # meanwhile `_on_loss` ends this process
                time.sleep(0.01)
            raise

    @contextmanager
    def limit(self, seconds: float, reason: str) -> Iterator[None]:
        """End this process with `reason` if the context takes longer: ranks that wait for each other in a kernel raise nothing."""
        timer = threading.Timer(seconds, self._on_loss, [reason])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self, grace: float = GRACE_SECONDS) -> None:
        """End all ranks; kill the rest after `grace` seconds. Returns when all have ended."""
        self._ending.acquire()
        self.send(End())
        self._processes.wait(grace)
        if self._nodes is not None:
            self._nodes.wait_ended(max(grace, REASON_SECONDS))

    def _on_loss(self, reason: str) -> None:
        """End this process because of a lost rank or node; called on the thread that noticed."""
        if not self._ending.acquire(blocking=False):
            return  # it was told to end, or another rank was lost before
        logger.error("%s", reason)
        self._outbox.send(Failed(reason=reason))
        self._processes.kill()
        # gives the reason time to leave; the main thread may hang in a collective and cannot close its socket
        time.sleep(REASON_SECONDS)
        logging.shutdown()
        os._exit(1)
