"""Rank 0's hold on the other ranks, those of its own node and those of others: it tells them each step, and hears of their end.

When one of them ends before it should, this process ends too, with the reason as its own: a model of which a part is missing computes
nothing, and a collective may wait for that part for ever.
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
from fairlead_worker.engine.loop import Outbox
from fairlead_worker.messages import Failed
from fairlead_worker.parallel.messages import AdapterFetched, End, FetchFiles, LoadModel, ToRank
from fairlead_worker.parallel.nodes import Nodes
from fairlead_worker.parallel.processes import LAST_WORDS_SECONDS, Processes

if TYPE_CHECKING:
    from fairlead_worker.sharding.group import Group

logger = logging.getLogger(__name__)

FOLLOWS_SECONDS = 2.0
"""How long the end of a process may take to show after something that was done together has failed."""
GRACE_SECONDS = 3.0
"""After which a rank that was told to end is killed."""


class Ranks:
    """The ranks from 1 on. For one thread; others of its own wait for processes and nodes."""

    def __init__(self, config: WorkerConfig, outbox: Outbox, parent: str | None = None) -> None:
        """Starts those of this node. Raises OSError where other nodes could not come in. `parent`: as of `Processes`."""
        self.size = config.tensor_parallel
        self._outbox = outbox
        self._encoder = msgspec.msgpack.Encoder()
        self._ending = threading.Lock()
        """Held by whoever decides how this ends, to the end: `close`, or the thread of the first rank or node that is lost."""
        self._nodes = Nodes(config, outbox, self._lost) if config.nodes > 1 else None
        meeting = "" if self._nodes is None else self._nodes.meeting
        others = range(1, config.local_ranks)
        self._processes = Processes(others, self.size, config.model_dump(), self._lost, meeting=meeting, parent=parent)

    def join(self) -> "Group":
        """Meets the others, once all nodes are there; waits for them as long as it takes."""
        from fairlead_worker.sharding.group import Group
        from fairlead_worker.sharding.rendezvous import file_store

        if self._nodes is None:
            return Group.join(file_store(self._processes.directory), 0, self.size)
        self._nodes.wait()
        return Group.join(self._nodes.store(self.size), 0, self.size)

    def tell(self, message: ToRank) -> None:
        """To all of them; never waits."""
        data = self._encoder.encode(message)
        if self._nodes is not None:
            self._nodes.tell(data)
        self._processes.tell(data)

    def load(self, folder: Path) -> None:
        """The model's files are there, on this node: others find them by themselves."""
        self._processes.tell(self._encoder.encode(LoadModel(str(folder.absolute()))))

    def fetched(self, number: int, folder: Path) -> None:
        """An adapter's files are there, on this node."""
        self._processes.tell(self._encoder.encode(AdapterFetched(number, str(folder.absolute()))))

    def fetch(self, wanted: FetchFiles) -> None:
        """Has the other nodes fetch an adapter's files by themselves; what comes of it is sent by itself."""
        assert self._nodes is not None, "nobody asks for it where there are none"
        self._nodes.fetch(wanted)

    def loaded(self) -> None:
        """Rank 0 has its part: from now on the load of the others is what is waited for."""
        if self._nodes is not None:
            self._nodes.report = True

    @contextmanager
    def together(self) -> Iterator[None]:
        """For what is done together with the others. Where one of them has ended, that ends this process, and is the reason."""
        try:
            yield
        except Exception:
            deadline = time.monotonic() + FOLLOWS_SECONDS * (1 if self._nodes is None else 2)
            while time.monotonic() < deadline:
                if self._processes.any_ended:
                    time.sleep(10 * LAST_WORDS_SECONDS)  # the thread that has waited for it ends this process meanwhile
                time.sleep(0.01)
            raise

    def close(self, grace: float = GRACE_SECONDS) -> None:
        """Ends them, after `grace` seconds by force. Returns when none is left."""
        with self._ending:
            self.tell(End())
            self._processes.wait(grace)
            if self._nodes is not None:
                self._nodes.wait_gone(max(grace, LAST_WORDS_SECONDS))

    def _lost(self, reason: str) -> None:
        """On the thread of whoever has seen it."""
        if not self._ending.acquire(blocking=False):
            return  # it was told to, or another one was lost before
        logger.error("%s", reason)
        self._outbox.send(Failed(reason=reason))
        self._processes.kill()
        time.sleep(LAST_WORDS_SECONDS)  # the main thread may hang in a collective: nobody could close its socket
        logging.shutdown()
        os._exit(1)
