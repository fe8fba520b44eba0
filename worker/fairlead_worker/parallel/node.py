"""A node of a model other than the leader's: runs its ranks, and stands for rank 0 there. Serves nothing.

`fairlead-worker --nnodes N --node-rank 1 --master-addr HOST:PORT` and the leader's other flags start it. Node
and leader wait for each other. The end of either is the end of both.
"""

import logging
import os
import queue
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from fairlead_worker.api.engine.load_progress import MIN_BYTES, MIN_CPU, Work
from fairlead_worker.config import WorkerConfig
from fairlead_worker.errors import AdapterError
from fairlead_worker.parallel.keys import unlock
from fairlead_worker.parallel.links import FAILED, LINGER_MS, Socket, endpoint, make_socket, monitor, read_events
from fairlead_worker.parallel.messages import (
    AdapterFetched,
    End,
    FetchDone,
    FetchFiles,
    Hello,
    LoadModel,
    NodeFailed,
    NodeRejected,
    Progress,
    Welcome,
)
from fairlead_worker.parallel.nodes import shared
from fairlead_worker.parallel.processes import Processes
from fairlead_worker.platform.version import release
from fairlead_worker.weights.cache import ModelCache

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Seconds between two join attempts, and between two progress reports."""
REMINDER_SECONDS = 60.0
"""Seconds between two log lines that name the awaited leader."""
MAX_FAILED_HANDSHAKES = 3
"""Failed handshakes in a row before giving up: one may belong to a leader that just ended."""
GRACE_SECONDS = 3.0
END = msgspec.msgpack.encode(End())


class NodeStopped(Exception):
    """Ends this node. The message is the reason; empty after an orderly stop."""


def serve(config: WorkerConfig) -> str:
    """Until the leader's end, or one of its own. The reason of a failure; empty after an ordered end."""
    node = Node(config)
    try:
        node.run()
    except NodeStopped as stopped:
        return str(stopped)
    finally:
        node.close()
    return ""


class Node:
    """The agent of the leader on this node. All on one thread, but for signals, the download and the waits for processes."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._context = zmq.Context()
        self._host, port = config.leader_address
        self._leader = f"the leader at {self._host}:{port}"
        self._leader_socket = self._socket(zmq.DEALER, port)
        self._leader_monitor = monitor(self._leader_socket)
        self._processes: Processes | None = None
        self._events: queue.SimpleQueue[NodeStopped | Path | Progress | AdapterFetched | FetchDone] = queue.SimpleQueue()
        """From other threads: why this node ends, the folders of the model and of adapters, how far a download is, or why it failed."""
        self._cache = ModelCache(Path(config.model_cache), config.pod) if config.model_cache else None
        self._report = Progress(config.node_rank, "imports", 0, "", 0, 0, 0)
        self._work, self._loading = Work(), True
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def run(self) -> None:
        """Raises Over."""
        welcome = self._join()
        logger.info("in, as node %d of %d", self._config.node_rank, self._config.nnodes)
        steps = self._socket(zmq.PULL, welcome.steps)
        steps_monitor = monitor(steps)
        config, first = self._config, self._config.node_rank * self._config.local_ranks
        meeting = endpoint(self._host, welcome.meeting).removeprefix("tcp://")
        ranks = range(first, first + config.local_ranks)
        self._processes = Processes(ranks, config.tensor_parallel_size, config.model_dump(), self._rank_lost, meeting=meeting, first=first)
        threading.Thread(target=self._resolve_files, name="model", daemon=True).start()
        poller = zmq.Poller()  # steps first: nothing else is in a hurry
        for each in (steps, steps_monitor, self._leader_socket, self._leader_monitor):
            poller.register(each, zmq.POLLIN)
        last_report = 0.0
        while True:
            ready: dict[object, int] = dict(poller.poll(int(RETRY_SECONDS * 100)))
            while steps in ready and steps.poll(0):
                *addressed, data = steps.recv_multipart()
                if addressed:
                    self._fetch(msgspec.msgpack.decode(data, type=FetchFiles))
                else:
                    self._forward(self._processes, data)
            events = read_events(steps_monitor) if steps_monitor in ready else []
            if zmq.EVENT_HANDSHAKE_SUCCEEDED in events:
                logger.info("hears the steps of the leader")
            if self._leader_monitor in ready:
                events += read_events(self._leader_monitor)
            if zmq.EVENT_DISCONNECTED in events:
                raise NodeStopped(f"{self._leader} is gone, or the network to it: its own log says why")
            if self._leader_socket in ready:
                self._leader_socket.recv()  # a second answer to a greeting that was said twice
            self._handle_events(self._processes)
            if self._loading and time.monotonic() >= last_report + RETRY_SECONDS:
                last_report = time.monotonic()
                self._send_progress()

    def close(self) -> None:
        """Leaves no process behind, and nothing unsaid."""
        if self._processes is not None:
            self._processes.kill()
        self._context.destroy(LINGER_MS)

    def _socket(self, kind: int, port: int) -> Socket:
        socket = make_socket(self._context, kind)
        unlock(socket, self._config.nodes_secret)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # drop messages while there is no connection: they are sent again
        socket.connect(endpoint(self._host, port))
        return socket

    def _join(self) -> Welcome:
        config, pod = self._config, self._config.pod
        hello = msgspec.msgpack.encode(Hello(config.node_rank, pod, release(), shared(config)))
        failed_handshakes, last_log = 0, -REMINDER_SECONDS
        while True:
            if time.monotonic() >= last_log + REMINDER_SECONDS:
                last_log = time.monotonic()
                logger.info("node %d of %d waits for %s", config.node_rank, config.nnodes, self._leader)
            self._send(hello)
            if self._leader_socket.poll(int(RETRY_SECONDS * 1000)):
                answer: Welcome | NodeRejected = msgspec.msgpack.decode(self._leader_socket.recv(), type=Welcome | NodeRejected)
                if isinstance(answer, NodeRejected):
                    raise NodeStopped(f"{self._leader} refuses this node: {answer.reason}")
                read_events(self._leader_monitor)  # of connections before this one: from now on the end of one is the leader's
                return answer
            self._handle_events(None)
            for event in read_events(self._leader_monitor):
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    failed_handshakes = 0
                elif event == zmq.EVENT_DISCONNECTED or event & FAILED:
                    failed_handshakes += 1
            if failed_handshakes >= MAX_FAILED_HANDSHAKES:
                raise NodeStopped(f"{self._leader} does not take this node's secret: FAIRLEAD_NODES_SECRET has to be the same on all nodes")

    def _forward(self, processes: Processes, data: bytes) -> None:
        """What rank 0 says to its ranks, to those that are here."""
        processes.tell(data)
        self._loading = False
        if data == END:
            logger.info("%s has ended in order", self._leader)
            self._events.put(NodeStopped())
            processes.wait(GRACE_SECONDS)

    def _handle_events(self, processes: Processes | None) -> None:
        while not self._events.empty():
            match self._events.get():
                case Path() as folder:
                    assert processes is not None
                    processes.tell(msgspec.msgpack.encode(LoadModel(str(folder))))
                    self._report_weights_phase()
                case Progress() as report:
                    self._report = report
                case AdapterFetched(number=number) as fetched:
                    assert processes is not None
                    processes.tell(msgspec.msgpack.encode(fetched))  # before the leader hears of it, and tells them to read it
                    self._send(msgspec.msgpack.encode(FetchDone(self._config.node_rank, number)))
                    self._report_weights_phase()
                case FetchDone() as failed:
                    self._send(msgspec.msgpack.encode(failed))
                case NodeStopped() as stopped:
                    if str(stopped) and processes is not None:
                        self._send(msgspec.msgpack.encode(NodeFailed(self._config.node_rank, str(stopped))))
                    raise stopped

    def _report_weights_phase(self) -> None:
        """What has been downloaded is what the ranks read now."""
        self._report = msgspec.structs.replace(self._report, phase="weights", percent=0, detail="", done=0, total=0)

    def _send_progress(self) -> None:
        """The download's own figures, and whether the processes here have read or computed since."""
        work, before = Work.measure(os.getsid(0)), self._work
        if work.cpu_seconds - before.cpu_seconds >= MIN_CPU or abs(work.bytes - before.bytes) >= MIN_BYTES:
            self._work = work
            self._report = msgspec.structs.replace(self._report, beat=self._report.beat + 1)
        self._send(msgspec.msgpack.encode(self._report))

    def _send(self, data: bytes) -> None:
        with suppress(zmq.Again):  # there is no leader, or none any more, which the monitors tell
            self._leader_socket.send(data, zmq.NOBLOCK)

    def _resolve_files(self) -> None:
        """The files of the model and of `--lora-modules`, on this node."""
        from fairlead_worker.build import describe_error
        from fairlead_worker.lora.source import adapter_folder
        from fairlead_worker.weights.uri import resolve

        def progress(phase: str, percent: int, done: int = 0, total: int = 0, note: str = "") -> None:
            self._events.put(Progress(self._config.node_rank, phase, percent, note, done, total, done))

        try:
            self._events.put(resolve(self._config.model, progress, self._cache).absolute())
            for number, (name, uri) in enumerate(self._config.loras.items(), 1):
                self._events.put(AdapterFetched(number, str(adapter_folder(name, uri, progress, self._cache).absolute())))
        except Exception as error:
            logger.exception("the files cannot be had")
            self._events.put(NodeStopped(describe_error(error)))

    def _fetch(self, wanted: FetchFiles) -> None:
        """An adapter's files, while the ranks compute; one that hangs holds up no other."""
        from fairlead_worker.lora.source import warmed_folder

        def fetch() -> None:
            try:
                self._events.put(AdapterFetched(wanted.number, str(warmed_folder(wanted.name, wanted.uri, self._cache).absolute())))
            except Exception as error:
                logger.warning("%s", error)
                cause = error.cause if isinstance(error, AdapterError) else f"{type(error).__name__}: {error}"
                self._events.put(FetchDone(self._config.node_rank, wanted.number, cause))

        threading.Thread(target=fetch, name=f"fetch {wanted.name}", daemon=True).start()

    def _rank_lost(self, reason: str) -> None:
        """On a thread of the rank's own."""
        self._events.put(NodeStopped(reason))

    def _on_signal(self, number: int, _: object) -> None:
        """The leader drains, and ends this node when it is done; whoever asks this one to end has asked the leader too (LeaderWorkerSet
        restarts a group as a whole). A terminal's Ctrl-C, and a node without a leader, end at once."""
        if self._processes is None:
            self._events.put(NodeStopped())
        elif number == signal.SIGINT:
            self._events.put(NodeStopped(f"node {self._config.node_rank} was ended by SIGINT"))
        else:
            logger.info("SIGTERM: goes on until %s has finished its streams", self._leader)
