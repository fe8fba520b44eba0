"""A follower node of a model on several nodes: it runs its ranks and forwards the leader's messages to them. It serves no requests.

`fairlead-worker --nnodes N --node-rank 1 --master-addr HOST:PORT` with the leader's other flags starts it. Node and leader wait for each
other. If one of them ends, the other ends too.
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

from fairlead_worker.config import WorkerConfig
from fairlead_worker.errors import AdapterError
from fairlead_worker.ipc.messages import FetchAdapter
from fairlead_worker.parallel.keys import secure_client
from fairlead_worker.parallel.links import FAILED, LINGER_MS, Socket, endpoint, make_socket, monitor, read_events
from fairlead_worker.parallel.messages import (
    AdapterFetched,
    End,
    FetchDone,
    Hello,
    LoadModel,
    NodeFailed,
    NodeRejected,
    Progress,
    Welcome,
)
from fairlead_worker.parallel.nodes import shared_settings
from fairlead_worker.parallel.processes import Processes
from fairlead_worker.platform.processes import Work
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
    """This node has to end. The message is the reason, or empty after an orderly stop."""


def serve(config: WorkerConfig) -> str:
    """Run this node until it or the leader ends. Return the reason of a failure, or an empty string after an orderly stop."""
    node = Node(config)
    try:
        node.run()
    except NodeStopped as stopped:
        return str(stopped)
    finally:
        node.close()
    return ""


class Node:
    """The leader's agent on this node. One thread does everything except signals, downloads and waits for processes."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._context = zmq.Context()
        self._host, port = config.leader_address
        self._leader = f"the leader at {self._host}:{port}"
        self._leader_socket = self._socket(zmq.DEALER, port)
        self._leader_monitor = monitor(self._leader_socket)
        self._processes: Processes | None = None
        self._events: queue.SimpleQueue[NodeStopped | Path | Progress | AdapterFetched | FetchDone] = queue.SimpleQueue()
        """Events from other threads: this node has to end, the model's folder, progress, an adapter's folder or its failure."""
        self._cache = ModelCache(Path(config.model_cache), config.pod) if config.model_cache else None
        self._report = Progress(config.node_rank, "imports", 0, "", 0, 0, 0)
        self._work, self._loading = Work(), True
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def run(self) -> None:
        """Join the leader and run the ranks. Raises NodeStopped, always."""
        welcome = self._join()
        logger.info("joined %s as node %d of %d", self._leader, self._config.node_rank, self._config.nnodes)
        steps = self._socket(zmq.PULL, welcome.steps)
        steps_monitor = monitor(steps)
        config, first = self._config, self._config.node_rank * self._config.local_ranks
        meeting = endpoint(self._host, welcome.meeting).removeprefix("tcp://")
        ranks = range(first, first + config.local_ranks)
        self._processes = Processes(ranks, config.tensor_parallel_size, config.model_dump(), self._rank_lost, meeting=meeting, first=first)
        threading.Thread(target=self._resolve_files, name="model", daemon=True).start()
        poller = zmq.Poller()  # steps come first, because only they are urgent
        for socket in (steps, steps_monitor, self._leader_socket, self._leader_monitor):
            poller.register(socket, zmq.POLLIN)
        last_report = 0.0
        while True:
            ready: dict[object, int] = dict(poller.poll(int(RETRY_SECONDS * 100)))
            while steps in ready and steps.poll(0):
                *marker, data = steps.recv_multipart()
                if marker:  # a message of two parts is for the node, all others are for its ranks
                    self._fetch(msgspec.msgpack.decode(data, type=FetchAdapter))
                else:
                    self._forward_to_ranks(self._processes, data)
            events = read_events(steps_monitor) if steps_monitor in ready else []
            if zmq.EVENT_HANDSHAKE_SUCCEEDED in events:
                logger.info("connected to the leader's steps")
            if self._leader_monitor in ready:
                events += read_events(self._leader_monitor)
            if zmq.EVENT_DISCONNECTED in events:
                raise NodeStopped(f"lost the connection to {self._leader}: it ended, or the network failed; see the leader's log")
            if self._leader_socket in ready:
                self._leader_socket.recv()  # `Hello` may have been sent twice, and then has two answers
            self._handle_events(self._processes)
            if self._loading and time.monotonic() >= last_report + RETRY_SECONDS:
                last_report = time.monotonic()
                self._send_progress()

    def close(self) -> None:
        """Kill the ranks, and send the messages that are still queued."""
        if self._processes is not None:
            self._processes.kill()
        self._context.destroy(LINGER_MS)

    def _socket(self, kind: int, port: int) -> Socket:
        socket = make_socket(self._context, kind)
        secure_client(socket, self._config.nodes_secret)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # drop messages while there is no connection: they are sent again
        socket.connect(endpoint(self._host, port))
        return socket

    def _join(self) -> Welcome:
        config, pod = self._config, self._config.pod
        hello = msgspec.msgpack.encode(Hello(config.node_rank, pod, release(), shared_settings(config)))
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
                read_events(self._leader_monitor)  # drop events of earlier connections: a later disconnect is the leader's end
                return answer
            self._handle_events(None)
            for event in read_events(self._leader_monitor):
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    failed_handshakes = 0
                elif event == zmq.EVENT_DISCONNECTED or event & FAILED:
                    failed_handshakes += 1
            if failed_handshakes >= MAX_FAILED_HANDSHAKES:
                raise NodeStopped(f"{self._leader} rejects this node's secret: set FAIRLEAD_NODES_SECRET to the same value on all nodes")

    def _forward_to_ranks(self, processes: Processes, data: bytes) -> None:
        """Forward a message of rank 0 to the ranks of this node."""
        processes.send(data)
        self._loading = False
        if data == END:
            logger.info("%s has stopped", self._leader)
            self._events.put(NodeStopped())
            processes.wait(GRACE_SECONDS)

    def _handle_events(self, processes: Processes | None) -> None:
        while not self._events.empty():
            match self._events.get():
                case Path() as folder:
                    assert processes is not None
                    processes.send(msgspec.msgpack.encode(LoadModel(str(folder))))
                    self._report_weights_phase()
                case Progress() as report:
                    self._report = report
                case AdapterFetched(number=number) as fetched:
                    assert processes is not None
                    # The ranks must know the folder before the leader's next message tells them to read it.
                    processes.send(msgspec.msgpack.encode(fetched))
                    self._send(msgspec.msgpack.encode(FetchDone(self._config.node_rank, number)))
                    self._report_weights_phase()
                case FetchDone() as failed:
                    self._send(msgspec.msgpack.encode(failed))
                case NodeStopped() as stopped:
                    if str(stopped) and processes is not None:
                        self._send(msgspec.msgpack.encode(NodeFailed(self._config.node_rank, str(stopped))))
                    raise stopped

    def _report_weights_phase(self) -> None:
        """Set the reported phase to `weights`: the ranks read the files that were downloaded."""
        self._report = msgspec.structs.replace(self._report, phase="weights", percent=0, detail="", done=0, total=0)

    def _send_progress(self) -> None:
        """Send the download's progress, and whether processes of this node have read or computed since the last report."""
        work = Work.measure(os.getsid(0))
        if work.computed_since(self._work) or work.moved_bytes_since(self._work):
            self._work = work
            self._report = msgspec.structs.replace(self._report, beat=self._report.beat + 1)
        self._send(msgspec.msgpack.encode(self._report))

    def _send(self, data: bytes) -> None:
        with suppress(zmq.Again):  # not connected; the monitors report that
            self._leader_socket.send(data, zmq.NOBLOCK)

    def _resolve_files(self) -> None:
        """Fetch the files of the model and of `--lora-modules` to this node."""
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
            logger.exception("cannot fetch the model's files")
            self._events.put(NodeStopped(describe_error(error)))

    def _fetch(self, request: FetchAdapter) -> None:
        """Fetch an adapter's files in a thread of its own, while the ranks compute. A download that hangs blocks no other."""
        from fairlead_worker.lora.source import warm_folder

        def fetch() -> None:
            try:
                self._events.put(AdapterFetched(request.number, str(warm_folder(request.name, request.uri, self._cache).absolute())))
            except Exception as error:
                logger.warning("%s", error)
                cause = error.cause if isinstance(error, AdapterError) else f"{type(error).__name__}: {error}"
                self._events.put(FetchDone(self._config.node_rank, request.number, cause))

        threading.Thread(target=fetch, name=f"fetch {request.name}", daemon=True).start()

    def _rank_lost(self, reason: str) -> None:
        """Record the end of a rank. It runs on the thread that waits for the rank's process."""
        self._events.put(NodeStopped(reason))

    def _on_signal(self, number: int, _: object) -> None:
        """Ignore SIGTERM while there is a leader: it got the signal too, drains, and then ends this node.

        LeaderWorkerSet restarts a group as a whole. SIGINT from a terminal, and a node without a leader, end immediately.
        """
        if self._processes is None:
            self._events.put(NodeStopped())
        elif number == signal.SIGINT:
            self._events.put(NodeStopped(f"node {self._config.node_rank} was ended by SIGINT"))
        else:
            logger.info("SIGTERM: this node continues until %s has finished its streams", self._leader)
